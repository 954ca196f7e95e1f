/* Sends long bodies from memory on threads of their own: see kvobj/wire/body_senders.py, the one user.
 *
 * A fixed number of threads, each with one body at a time. Nobody waits here for a client that is slow: a sending ends when too little
 * has left for too long, and its owner goes on by other means. The socket is non-blocking and stays its owner's, as does the
 * memory; after `kvobj_sender_end` neither is used.
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
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define PIECE_BYTES ((size_t)1 << 20) /* of one system call: bounds how long `kvobj_sender_end` waits */
#define SENDERS_MAX 64

/* FREE → READY ⇄ SENDING → ENDED → FREE; READY → LEFT → FREE when its owner goes first. SENDING: within the system call that reads
 * the memory. The owner makes FREE → READY, READY → LEFT and ENDED → FREE, the thread the others. Once it was LEFT the number of
 * the socket may be another's: all that the thread may still do to that one is to poll it. */
enum { FREE, READY, SENDING, LEFT, ENDED };
enum { WHOLE, SLOW, FAILED };

struct senders;

typedef struct {
    /* Read by the owner, as body_senders.py lays it out. */
    _Atomic int32_t state;
    int32_t outcome;
    _Atomic uint64_t sent;
    /* Written by the owner while FREE. */
    int fd;
    const unsigned char *memory;
    uint64_t size;
    /* The thread's. */
    sem_t go;
    pthread_t thread;
    struct senders *all;
} sender_t;

typedef struct senders {
    int count, event_fd;
    int64_t patience_ns;
    uint64_t patience_bytes;
    _Atomic bool is_closing;
    sender_t each[];
} senders_t;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static bool step_to(sender_t *s, int32_t from, int32_t to) { return atomic_compare_exchange_strong(&s->state, &from, to); }

/* How it ended; the state is READY, or LEFT where the owner went first. */
static int send_all(sender_t *s) {
    uint64_t sent = 0, marked = 0;
    int64_t since = now_ns(), patience_ns = s->all->patience_ns;
    while (sent < s->size) {
        size_t piece = s->size - sent < PIECE_BYTES ? (size_t)(s->size - sent) : PIECE_BYTES;
        if (!step_to(s, READY, SENDING)) return WHOLE;
        ssize_t count = send(s->fd, s->memory + sent, piece, MSG_DONTWAIT | MSG_NOSIGNAL);
        int error = count < 0 ? errno : 0;
        if (count > 0) atomic_store(&s->sent, sent += (uint64_t)count);
        atomic_store(&s->state, READY);
        if (count == (ssize_t)piece || error == EINTR) continue;
        if (count < 0 && error != EAGAIN && error != EWOULDBLOCK) return FAILED;
        int64_t now = now_ns();
        if (now - since >= patience_ns) {
            if (sent - marked < s->all->patience_bytes) return SLOW;
            since = now, marked = sent;
        }
        struct pollfd wait = {.fd = s->fd, .events = POLLOUT};
        poll(&wait, 1, (int)(patience_ns / 1000000));
    }
    return WHOLE;
}

static void *run(void *argument) {
    sender_t *s = argument;
    for (;;) {
        while (sem_wait(&s->go) && errno == EINTR) {}
        if (atomic_load(&s->all->is_closing)) return NULL;
        s->outcome = send_all(s);
        if (step_to(s, READY, ENDED)) {
            uint64_t one = 1;
            ssize_t written = write(s->all->event_fd, &one, sizeof one);
            (void)written; /* full: the owner has been told already */
        } else {
            atomic_store(&s->state, FREE);
        }
    }
}

/* Threads that end with `kvobj_senders_close`. `event_fd` (non-blocking) is written to when a sending has ended; SLOW is one that sent
 * less than `patience_bytes` in `patience_ms`. NULL where there is no memory or no thread. */
EXPORTED senders_t *kvobj_senders_open(int count, int event_fd, int patience_ms, uint64_t patience_bytes) {
    if (count < 1 || count > SENDERS_MAX) return NULL;
    senders_t *all = calloc(1, sizeof *all + (size_t)count * sizeof(sender_t));
    if (!all) return NULL;
    all->event_fd = event_fd;
    all->patience_ns = (int64_t)patience_ms * 1000000;
    all->patience_bytes = patience_bytes;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 * 1024);
    for (; all->count < count; all->count++) {
        sender_t *s = &all->each[all->count];
        s->all = all;
        sem_init(&s->go, 0, 0);
        if (pthread_create(&s->thread, &attributes, run, s)) break;
    }
    pthread_attr_destroy(&attributes);
    if (all->count) return all;
    free(all);
    return NULL;
}

/* How many threads there are. */
EXPORTED int kvobj_senders_count(const senders_t *all) { return all->count; }

/* What the owner may read of one of them. */
EXPORTED sender_t *kvobj_sender_at(senders_t *all, int index) { return &all->each[index]; }

/* Send on any thread that is free; its index, or -1. One caller at a time. */
EXPORTED int kvobj_sender_begin(senders_t *all, int fd, const unsigned char *memory, uint64_t size) {
    for (int index = 0; index < all->count; index++) {
        sender_t *s = &all->each[index];
        if (atomic_load(&s->state) != FREE) continue;
        s->fd = fd, s->memory = memory, s->size = size, s->outcome = WHOLE;
        atomic_store(&s->sent, 0);
        atomic_store(&s->state, READY);
        sem_post(&s->go);
        return index;
    }
    return -1;
}

/* The owner is done with it, whether it has ended or not: from here on nothing reads the memory. Waits for one system call at most.
 * How many bytes have been sent. Call it once for each `kvobj_sender_begin`, while the socket is open. */
EXPORTED uint64_t kvobj_sender_end(senders_t *all, int index) {
    sender_t *s = &all->each[index];
    while (!step_to(s, ENDED, FREE) && !step_to(s, READY, LEFT)) sched_yield();
    return atomic_load(&s->sent);
}

/* End the threads; waits for as long as one still polls a socket that was left. No sending may be going on. */
EXPORTED void kvobj_senders_close(senders_t *all) {
    atomic_store(&all->is_closing, true);
    for (int index = 0; index < all->count; index++) sem_post(&all->each[index].go);
    for (int index = 0; index < all->count; index++) {
        pthread_join(all->each[index].thread, NULL);
        sem_destroy(&all->each[index].go);
    }
    free(all);
}
