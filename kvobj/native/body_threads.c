/* Moves long bodies between sockets and memory on threads of their own: see kvobj/wire/body_threads.py, the one user.
 *
 * A fixed number of threads, each with one body at a time. Nobody waits here for a client that is slow: a moving ends when too little
 * has gone for too long, and its owner goes on by other means. The socket is non-blocking and stays its owner's, as does the
 * memory; after `kvobj_mover_end` neither is used.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define PIECE_BYTES ((size_t)1 << 20) /* of one system call: bounds how long `kvobj_mover_end` waits */
#define PARTS_A_CALL 64
#define MOVERS_MAX 64

/* FREE → READY ⇄ MOVING → ENDED → FREE; READY → LEFT → FREE when its owner goes first. MOVING: within the system call that uses
 * the memory. The owner makes FREE → READY, READY → LEFT and ENDED → FREE, the thread the others. Once it was LEFT the number of
 * the socket may be another's: all that the thread may still do to that one is to poll it. */
enum { FREE, READY, MOVING, LEFT, ENDED };
enum { WHOLE, SLOW, FAILED };
enum { SEND, RECEIVE };

struct movers;

typedef struct {
    /* Read by the owner, as body_threads.py lays it out. */
    _Atomic int32_t state;
    int32_t outcome;
    _Atomic uint64_t moved;
    /* Written by the owner while FREE. */
    int fd;
    unsigned char *memory;
    const struct iovec *parts; /* to be sent one after the other; NULL: `memory` is all */
    uint64_t size;
    int low_water;
    /* The thread's. */
    size_t part_moved; /* of `parts[0]`: those before it are through */
    sem_t go;
    pthread_t thread;
    struct movers *all;
} mover_t;

typedef struct movers {
    int count, event_fd, direction;
    int64_t patience_ns;
    uint64_t patience_bytes, told_bytes;
    _Atomic bool is_closing;
    mover_t each[];
} movers_t;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static bool step_to(mover_t *s, int32_t from, int32_t to) { return atomic_compare_exchange_strong(&s->state, &from, to); }

static void tell(const movers_t *all) {
    uint64_t one = 1;
    ssize_t written = write(all->event_fd, &one, sizeof one);
    (void)written; /* full: the owner has been told already */
}

/* Bytes sent of the next `*piece`, which may turn out shorter: so many parts go into one call. */
static ssize_t send_parts(mover_t *m, size_t *piece) {
    struct iovec window[PARTS_A_CALL];
    struct msghdr message = {.msg_iov = window};
    size_t total = 0, skipped = m->part_moved;
    for (const struct iovec *part = m->parts; total < *piece && message.msg_iovlen < PARTS_A_CALL; part++, skipped = 0) {
        size_t left = part->iov_len - skipped, room = *piece - total, taken = left < room ? left : room;
        window[message.msg_iovlen++] = (struct iovec){(unsigned char *)part->iov_base + skipped, taken};
        total += taken;
    }
    *piece = total;
    ssize_t count = sendmsg(m->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count <= 0) return count;
    m->part_moved += (size_t)count;
    for (; m->part_moved && m->part_moved >= m->parts->iov_len; m->parts++) m->part_moved -= m->parts->iov_len;
    return count;
}

/* Bytes moved of the next `*piece`, as `send_parts`; 0: the peer sends no more. */
static ssize_t move(mover_t *m, uint64_t moved, size_t *piece) {
    if (m->parts) return send_parts(m, piece);
    return m->all->direction == SEND ? send(m->fd, m->memory + moved, *piece, MSG_DONTWAIT | MSG_NOSIGNAL)
                                     : recv(m->fd, m->memory + moved, *piece, MSG_DONTWAIT);
}

/* Less is left than the socket wakes for: wake for that. Within MOVING, since only then the number is the socket's for certain. */
static void lower_water(mover_t *m, uint64_t left) {
    if (left >= (uint64_t)m->low_water) return;
    m->low_water = left ? (int)left : 1;
    setsockopt(m->fd, SOL_SOCKET, SO_RCVLOWAT, &m->low_water, sizeof m->low_water);
}

/* How it ended; the state is READY, or LEFT where the owner went first. */
static int move_all(mover_t *m) {
    const movers_t *all = m->all;
    uint64_t moved = 0, marked = 0, told = 0;
    int64_t since = now_ns(), patience_ns = all->patience_ns;
    while (moved < m->size) {
        size_t piece = m->size - moved < PIECE_BYTES ? (size_t)(m->size - moved) : PIECE_BYTES;
        if (!step_to(m, READY, MOVING)) return WHOLE;
        ssize_t count = move(m, moved, &piece);
        int error = count < 0 ? errno : 0;
        if (count > 0) atomic_store(&m->moved, moved += (uint64_t)count);
        if (m->low_water) lower_water(m, m->size - moved);
        atomic_store(&m->state, READY);
        if (all->told_bytes && moved - told >= all->told_bytes && moved < m->size) {
            told = moved;
            tell(all);
        }
        if (count == (ssize_t)piece || error == EINTR) continue;
        if (count < 0 && error != EAGAIN && error != EWOULDBLOCK) return FAILED;
        if (count == 0 && all->direction == RECEIVE) return FAILED;
        int64_t now = now_ns();
        if (now - since >= patience_ns) {
            if (moved - marked < all->patience_bytes) return SLOW;
            since = now, marked = moved;
        }
        struct pollfd wait = {.fd = m->fd, .events = all->direction == SEND ? POLLOUT : POLLIN};
        poll(&wait, 1, (int)(patience_ns / 1000000));
    }
    return WHOLE;
}

static void *run(void *argument) {
    mover_t *m = argument;
    for (;;) {
        while (sem_wait(&m->go) && errno == EINTR) {}
        if (atomic_load(&m->all->is_closing)) return NULL;
        m->outcome = move_all(m);
        if (step_to(m, READY, ENDED)) {
            tell(m->all);
        } else {
            atomic_store(&m->state, FREE);
        }
    }
}

/* Threads that end with `kvobj_movers_close`, which all SEND or all RECEIVE. `event_fd` (non-blocking) is written to when a moving has
 * ended, and after every `told_bytes` of one (0: not); SLOW is one that moved less than `patience_bytes` in `patience_ms`. NULL where
 * there is no memory or no thread. */
EXPORTED movers_t *kvobj_movers_open(int count, int event_fd, int direction, int patience_ms, uint64_t patience_bytes,
                                     uint64_t told_bytes) {
    if (count < 1 || count > MOVERS_MAX || (direction != SEND && direction != RECEIVE)) return NULL;
    movers_t *all = calloc(1, sizeof *all + (size_t)count * sizeof(mover_t));
    if (!all) return NULL;
    all->event_fd = event_fd;
    all->direction = direction;
    all->told_bytes = told_bytes;
    all->patience_ns = (int64_t)patience_ms * 1000000;
    all->patience_bytes = patience_bytes;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 * 1024);
    for (; all->count < count; all->count++) {
        mover_t *m = &all->each[all->count];
        m->all = all;
        sem_init(&m->go, 0, 0);
        if (pthread_create(&m->thread, &attributes, run, m)) break;
    }
    pthread_attr_destroy(&attributes);
    if (all->count) return all;
    free(all);
    return NULL;
}

/* How many threads there are. */
EXPORTED int kvobj_movers_count(const movers_t *all) { return all->count; }

/* What the owner may read of one of them. */
EXPORTED mover_t *kvobj_mover_at(movers_t *all, int index) { return &all->each[index]; }

static int begin(movers_t *all, int fd, unsigned char *memory, const struct iovec *parts, uint64_t size, int low_water) {
    for (int index = 0; index < all->count; index++) {
        mover_t *m = &all->each[index];
        if (atomic_load(&m->state) != FREE) continue;
        m->fd = fd, m->memory = memory, m->size = size, m->low_water = low_water, m->outcome = WHOLE;
        m->parts = parts, m->part_moved = 0;
        atomic_store(&m->moved, 0);
        atomic_store(&m->state, READY);
        sem_post(&m->go);
        return index;
    }
    return -1;
}

/* Move on any thread that is free; its index, or -1. One caller at a time. `low_water`: what SO_RCVLOWAT of the socket is, so that it
 * is lowered where less is left (0: leave it). */
EXPORTED int kvobj_mover_begin(movers_t *all, int fd, unsigned char *memory, uint64_t size, int low_water) {
    return begin(all, fd, memory, NULL, size, low_water);
}

/* Send several parts, `size` bytes in all and more than none, one after the other; else as `kvobj_mover_begin`. They and what they
 * name are the mover's until `kvobj_mover_end`. -1, too, where the threads receive. */
EXPORTED int kvobj_mover_begin_parts(movers_t *all, int fd, const struct iovec *parts, uint64_t size) {
    return all->direction == SEND ? begin(all, fd, NULL, parts, size, 0) : -1;
}

/* The owner is done with it, whether it has ended or not: from here on nothing uses the memory. Waits for one system call at most.
 * How many bytes have been moved. Call it once for each `kvobj_mover_begin`, while the socket is open. */
EXPORTED uint64_t kvobj_mover_end(movers_t *all, int index) {
    mover_t *m = &all->each[index];
    while (!step_to(m, ENDED, FREE) && !step_to(m, READY, LEFT)) sched_yield();
    return atomic_load(&m->moved);
}

/* End the threads; waits for as long as one still polls a socket that was left. No moving may be going on. */
EXPORTED void kvobj_movers_close(movers_t *all) {
    atomic_store(&all->is_closing, true);
    for (int index = 0; index < all->count; index++) sem_post(&all->each[index].go);
    for (int index = 0; index < all->count; index++) {
        pthread_join(all->each[index].thread, NULL);
        sem_destroy(&all->each[index].go);
    }
    free(all);
}
