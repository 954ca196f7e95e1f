// Runs grids of warps whose 32 threads are fibers, one at a time, in an order that a seed gives, and says what a GPU would not forgive:
//
// - threads that meet at different collectives, or end while others wait (divergence);
// - a thread that touches what another one has written, or writes what another one has touched, without __syncwarp between them; no
//   other collective orders memory (CUDA C++ Programming Guide, "Warp Shuffle Functions");
// - a warp that does so with another warp of the launch, but for equal values written by several (status words);
// - an access that is not aligned to its size, or beyond the memory that the launch was given (where it says what that is);
// - a shift by as many bits as there are, or more.
//
// The first such thing is kept until it is asked for (emulated_problem). What the compiler's -fsanitize=thread calls at each access is
// defined here. One launch at a time.
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <ucontext.h>

#include "emulated_warp.h"

Emulated3 threadIdx, blockIdx, blockDim, gridDim;
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end; // the linker's: where this library begins and ends

namespace {

enum : unsigned { LANES = 32, BLOCK_WARPS = 2, BLOCKS = 3, STACK = 1 << 17, ASCENDING = 0, DESCENDING = 1 };
enum : uint8_t { SEVERAL_LANES = 255, ATOMIC = 254 };
enum : uint32_t { SEVERAL_WARPS = 0xffffffffu };
enum State : uint8_t { READY, WAITS, ENDED };

struct Fiber {
    std::unique_ptr<char[]> stack;
    jmp_buf at;
    bool has_begun = false;
    State state = READY;
    unsigned logical_warp = 0;
    EmulatedKind kind{};
    unsigned width = 0, argument = 0;
    unsigned long long value = 0, result = 0;
    void* site = nullptr;
    // A write to what another warp has written: right if it changes nothing.
    unsigned char* pending = nullptr;
    unsigned pending_bytes = 0;
    unsigned char before[16];
};
struct Warp {
    Fiber fibers[LANES];
    unsigned waiting = 0, ended = 0;
    uint32_t epoch = 0;
};

std::mutex one_at_a_time;
std::vector<Warp> warps_(BLOCK_WARPS * BLOCKS);
Fiber* running = nullptr;
Warp* running_warp = nullptr;
unsigned running_lane = 0;
jmp_buf scheduler;
ucontext_t begin_from, begin_to;
void (*grid_)(void*);
void* arguments_;
unsigned long arguments_bytes = 0;
const char* kernel_ = "";
char problem[1024];
uint64_t random_ = 1;
unsigned order_ = ASCENDING;
uint32_t launch_ = 0;
const uint64_t* given = nullptr; // address and size of each part of memory
unsigned given_count = 0;

uint32_t next_random() {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_ >> 33);
}
uint64_t place(void* pc) { return (uint64_t)((char*)pc - &__ehdr_start); } // as addr2line takes it
template <class... T> void say(const char* format, T... arguments) {
    if (problem[0]) return;
    const int at = snprintf(problem, sizeof problem, "kv_%s: ", kernel_);
    snprintf(problem + at, sizeof problem - at, format, arguments...);
}

// --- Fibers ----------------------------------------------------------------------------------------------------------------------------

void settle_pending();

[[noreturn]] void fiber_main() {
    running->has_begun = true;
    grid_(arguments_);
    settle_pending();
    running->state = ENDED;
    running_warp->ended++;
    _longjmp(scheduler, 1);
}

void resume(unsigned warp, unsigned lane) {
    running_warp = &warps_[warp];
    running = &running_warp->fibers[lane];
    running_lane = lane;
    threadIdx = {warp % BLOCK_WARPS * LANES + lane, 0, 0};
    blockIdx = {warp / BLOCK_WARPS, 0, 0};
    if (_setjmp(scheduler)) return;
    if (running->has_begun) _longjmp(running->at, 1);
    getcontext(&begin_to);
    begin_to.uc_stack.ss_sp = running->stack.get();
    begin_to.uc_stack.ss_size = STACK;
    begin_to.uc_link = nullptr;
    makecontext(&begin_to, (void (*)())fiber_main, 0);
    swapcontext(&begin_from, &begin_to);
}

void finish_meeting(Warp& w) {
    Fiber* f = w.fibers;
    const EmulatedKind kind = f[0].kind;
    unsigned long long all = kind == MEET_MIN ? 0xffffffffu : 0;
    for (unsigned lane = 0; lane < LANES; lane++) {
        if (kind == MEET_BALLOT) all |= f[lane].value << lane;
        if (kind == MEET_ADD) all = (uint32_t)(all + f[lane].value);
        if (kind == MEET_MAX && f[lane].value > all) all = f[lane].value;
        if (kind == MEET_MIN && f[lane].value < all) all = f[lane].value;
    }
    for (unsigned lane = 0; lane < LANES; lane++) {
        const unsigned argument = f[lane].argument;
        unsigned from = lane;
        if (kind == MEET_SHFL) from = argument % LANES;
        if (kind == MEET_SHFL_XOR) from = (lane ^ argument) % LANES;
        if (kind == MEET_SHFL_UP) from = lane >= argument ? lane - argument : lane;
        const bool is_shuffle = kind == MEET_SHFL || kind == MEET_SHFL_XOR || kind == MEET_SHFL_UP;
        f[lane].result = is_shuffle ? f[from].value : all;
        f[lane].state = READY;
    }
    w.waiting = 0;
    if (kind == MEET_SYNC) w.epoch++;
}

bool step_of(unsigned warp, unsigned lane) { // false where the launch is over: a problem
    resume(warp, lane);
    Warp& w = warps_[warp];
    if (w.waiting && w.ended) say("lane %u of warp %u ended or waits while others do not", lane, w.fibers[lane].logical_warp);
    if (w.waiting == LANES) finish_meeting(w);
    return !problem[0];
}

bool run_warp_by_warp() {
    const bool is_up = order_ == ASCENDING;
    for (unsigned nth = 0; nth < warps_.size(); nth++) {
        const unsigned warp = is_up ? nth : (unsigned)warps_.size() - 1 - nth;
        while (warps_[warp].ended < LANES)
            for (unsigned each = 0; each < LANES; each++) {
                const unsigned lane = is_up ? each : LANES - 1 - each;
                if (warps_[warp].fibers[lane].state == READY && !step_of(warp, lane)) return false;
            }
    }
    return true;
}

bool run_at_random() {
    std::vector<unsigned> ready;
    for (unsigned each = 0; each < warps_.size() * LANES; each++) ready.push_back(each);
    while (!ready.empty()) {
        const unsigned at = next_random() % ready.size(), chosen = ready[at], warp = chosen / LANES;
        ready[at] = ready.back();
        ready.pop_back();
        if (!step_of(warp, chosen % LANES)) return false;
        const Warp& w = warps_[warp];
        if (w.waiting == 0 && w.fibers[chosen % LANES].state == READY) // it was the last to come
            for (unsigned lane = 0; lane < LANES; lane++) ready.push_back(warp * LANES + lane);
    }
    return true;
}

// --- Memory ----------------------------------------------------------------------------------------------------------------------------

struct Cell { // of a byte
    uint32_t write_launch, read_launch, write_warp, read_warp, write_epoch, read_epoch, write_pc, read_pc;
    uint8_t write_lane, read_lane;
};
enum : uintptr_t { PAGE = 4096 };
std::unordered_map<uintptr_t, std::unique_ptr<Cell[]>> shadow;
uintptr_t last_page = ~(uintptr_t)0;
Cell* last_cells = nullptr;

Cell& cell_of(uintptr_t address) {
    const uintptr_t page = address / PAGE;
    if (page != last_page) {
        auto& cells = shadow[page];
        if (!cells) cells.reset(new Cell[PAGE]());
        last_page = page;
        last_cells = cells.get();
    }
    return last_cells[address % PAGE];
}
bool is_own(uintptr_t address) { // the stack, and a kernel's parameters
    return address - (uintptr_t)running->stack.get() < STACK || address - (uintptr_t)arguments_ < arguments_bytes;
}
std::unordered_map<unsigned, std::vector<unsigned>> warp_memory; // of this launch, by the warp's number
bool is_of_warp(uintptr_t address, unsigned size) {
    const auto found = warp_memory.find(running->logical_warp);
    if (found == warp_memory.end()) return false;
    const uintptr_t start = (uintptr_t)found->second.data();
    return address >= start && address + size <= start + 4 * found->second.size();
}
bool is_given(uintptr_t address, unsigned size) {
    if (is_of_warp(address, size)) return true;
    if (!given || address - (uintptr_t)&__ehdr_start < (uintptr_t)(&_end - &__ehdr_start)) return true; // tables of the library
    for (unsigned at = 0; at < given_count; at++)
        if (address >= given[2 * at] && address + size <= given[2 * at] + given[2 * at + 1]) return true;
    return false;
}
void settle_pending() {
    if (!running->pending) return;
    if (memcmp(running->pending, running->before, running->pending_bytes))
        say("warp %u changes what another warp of the launch has written", running->logical_warp);
    running->pending = nullptr;
}
void race(const char* what, unsigned warp, unsigned lane, uint32_t other_pc, void* pc) {
    say("%s between warp %u lane %u and warp %u lane %u (255: several, 254: atomics) at +0x%x and +0x%llx", what, warp, lane,
        running->logical_warp, running_lane, other_pc, (unsigned long long)place(pc));
}
void touched(void* to, unsigned size, bool is_write, bool is_atomic, void* pc) {
    if (!running) return;
    settle_pending();
    const uintptr_t address = (uintptr_t)to;
    if (is_own(address)) return;
    if (size <= 16 && address % size) say("an access of %u bytes is not aligned, at +0x%llx", size, (unsigned long long)place(pc));
    if (!is_given(address, size)) say("an access of %u bytes beyond what was given, at +0x%llx", size, (unsigned long long)place(pc));
    const unsigned warp = running->logical_warp;
    const uint32_t epoch = running_warp->epoch;
    const uint8_t lane = is_atomic ? (uint8_t)ATOMIC : (uint8_t)running_lane;
    const uint32_t short_pc = (uint32_t)place(pc);
    bool is_status = false;
    for (unsigned at = 0; at < size; at++) {
        Cell& c = cell_of(address + at);
        const bool was_written = c.write_launch == launch_, was_read = c.read_launch == launch_;
        if (was_written && c.write_warp != warp) {
            if (is_write && !is_atomic) is_status = true;
            else race("race", c.write_warp, c.write_lane, c.write_pc, pc);
        } else if (was_written && c.write_epoch == epoch && c.write_lane != lane) {
            race("race", warp, c.write_lane, c.write_pc, pc);
        }
        if (is_write) {
            if (was_read && c.read_warp != warp) race("race", c.read_warp, c.read_lane, c.read_pc, pc);
            else if (was_read && c.read_epoch == epoch && c.read_lane != lane) race("race", warp, c.read_lane, c.read_pc, pc);
            c.write_launch = launch_;
            c.write_warp = warp;
            c.write_epoch = epoch;
            c.write_lane = lane;
            c.write_pc = short_pc;
        } else {
            if (was_read && c.read_warp != warp) c.read_warp = SEVERAL_WARPS;
            else if (was_read && c.read_epoch == epoch && c.read_lane != lane) c.read_lane = SEVERAL_LANES;
            else c.read_warp = warp, c.read_lane = lane;
            c.read_launch = launch_;
            c.read_epoch = epoch;
            c.read_pc = short_pc;
        }
    }
    if (is_status && size <= sizeof running->before) {
        running->pending = (unsigned char*)to;
        running->pending_bytes = size;
        memcpy(running->before, to, size);
    }
}

} // namespace

#define KV_SHOWN extern "C" __attribute__((visibility("default")))

// The order of the launches that follow: 0, lanes and warps one after the other; 1, the same from the last; else at random from this seed.
KV_SHOWN void emulated_order(unsigned seed) {
    order_ = seed;
    random_ = seed;
}
// The memory that launches may touch from here on: so many addresses, each with a size in bytes; none: all. Not copied.
KV_SHOWN void emulated_given(const uint64_t* parts, unsigned count) {
    given = count ? parts : nullptr;
    given_count = count;
}
// What was wrong since it was last asked: "" if nothing was.
KV_SHOWN const char* emulated_problem() {
    static char told[sizeof problem];
    memcpy(told, problem, sizeof problem);
    problem[0] = 0;
    return told;
}
extern "C" void emulated_logical_warp(unsigned warp) { running->logical_warp = warp; }
extern "C" unsigned* emulated_warp_memory(unsigned bytes) {
    std::vector<unsigned>& memory = warp_memory[running->logical_warp];
    if (memory.empty()) memory.assign(bytes / 4, 0xc9c9c9c9u);
    return memory.data();
}

extern "C" void emulated_launch(const char* kernel, void (*grid)(void*), void* arguments, unsigned long size) {
    const std::lock_guard<std::mutex> held(one_at_a_time);
    if (problem[0]) return;
    kernel_ = kernel;
    grid_ = grid;
    arguments_ = arguments;
    arguments_bytes = size;
    launch_++;
    warp_memory.clear();
    gridDim = {BLOCKS, 1, 1};
    blockDim = {BLOCK_WARPS * LANES, 1, 1};
    for (Warp& warp : warps_) {
        warp.waiting = warp.ended = 0;
        for (Fiber& fiber : warp.fibers) {
            if (!fiber.stack) fiber.stack.reset(new char[STACK]);
            fiber.has_begun = false;
            fiber.state = READY;
            fiber.pending = nullptr;
        }
    }
    if (order_ <= DESCENDING) run_warp_by_warp();
    else run_at_random();
    running = nullptr;
}

extern "C" unsigned long long emulated_meet(EmulatedKind kind, unsigned width, unsigned mask, unsigned long long value, unsigned argument) {
    Fiber& f = *running;
    settle_pending();
    if (mask != ~0u) say("a collective of some lanes alone");
    for (const Fiber& other : running_warp->fibers)
        if (other.state == WAITS && (other.kind != kind || other.width != width))
            say("lane %u of warp %u is at collective %d of %u bytes, another at %d of %u", running_lane, f.logical_warp, (int)kind,
                width, (int)other.kind, other.width);
    f.kind = kind;
    f.width = width;
    f.argument = argument;
    f.value = value;
    f.state = WAITS;
    running_warp->waiting++;
    if (!_setjmp(f.at)) _longjmp(scheduler, 1);
    return f.result;
}

extern "C" unsigned emulated_atomic_add(unsigned* at, unsigned x) {
    touched(at, 4, true, true, __builtin_return_address(0));
    const unsigned before = *at;
    *at = before + x;
    return before;
}

// PTX: rcp.approx.ftz.f32 is off by at most one unit in the last place; here two.
extern "C" float emulated_divide_roughly(float x, float y) {
    const float exact = x / y;
    uint32_t bits;
    memcpy(&bits, &exact, 4);
    if (exact == 0 || (bits & 0x7f800000u) == 0x7f800000u || order_ == ASCENDING) return exact;
    bits += next_random() % 5 - 2;
    float rough;
    memcpy(&rough, &bits, 4);
    return rough;
}

// What the instrumented kernels call.
#define KV_TOUCH(size)                                                                                                                 \
    extern "C" void __tsan_read##size(void* at) { touched(at, size, false, false, __builtin_return_address(0)); }                       \
    extern "C" void __tsan_write##size(void* at) { touched(at, size, true, false, __builtin_return_address(0)); }                       \
    extern "C" void __tsan_unaligned_read##size(void* at) { touched(at, size, false, false, __builtin_return_address(0)); }             \
    extern "C" void __tsan_unaligned_write##size(void* at) { touched(at, size, true, false, __builtin_return_address(0)); }
KV_TOUCH(1)
KV_TOUCH(2)
KV_TOUCH(4)
KV_TOUCH(8)
KV_TOUCH(16)
extern "C" void __tsan_read_range(void* at, size_t size) { touched(at, (unsigned)size, false, false, __builtin_return_address(0)); }
extern "C" void __tsan_write_range(void* at, size_t size) { touched(at, (unsigned)size, true, false, __builtin_return_address(0)); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __ubsan_handle_shift_out_of_bounds(void*, unsigned long, unsigned long) {
    say("a shift by all bits or more, at +0x%llx", (unsigned long long)place(__builtin_return_address(0)));
}
