/* Ask on a stream socket, and take what is answered at once, in one call. See kvobj/client/native_exchange.py, the one user.
 *
 * An answer that comes within some tens of microseconds is waited for awake: to put a processor to sleep and to wake it again costs
 * both sides more than the answer does, on virtual machines several times as much (an interrupt to a halted processor leaves the
 * guest). Whoever else is to run on this processor runs meanwhile: each look gives it up.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define EXPORTED __attribute__((visibility("default")))
#define DESCRIPTORS_MAX 64

#ifndef MSG_CMSG_CLOEXEC
#define MSG_CMSG_CLOEXEC 0
#endif
#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

/* `sent` is kept from one call to the next: after EINTR the call is made again with the same arguments. */
typedef struct {
    uint64_t sent;
    uint64_t came;
    uint32_t flags;
    uint32_t descriptors;
    int32_t numbers[DESCRIPTORS_MAX];
} exchange_t;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int receive(exchange_t *x, int fd, void *in, uint64_t room) {
    union {
        char bytes[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int32_t))];
        struct cmsghdr aligned;
    } ancillary;
    struct iovec vector = {.iov_base = in, .iov_len = room};
    struct msghdr message = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = ancillary.bytes, .msg_controllen = sizeof ancillary.bytes};
    ssize_t came = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (came < 0) return errno;
    x->came = (uint64_t)came;
    x->flags = (uint32_t)message.msg_flags;
    for (struct cmsghdr *each = CMSG_FIRSTHDR(&message); each; each = CMSG_NXTHDR(&message, each)) {
        if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
        size_t count = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int32_t);
        if (count > DESCRIPTORS_MAX - x->descriptors) count = DESCRIPTORS_MAX - x->descriptors; /* there is no room for more */
        memcpy(x->numbers + x->descriptors, CMSG_DATA(each), count * sizeof(int32_t));
        x->descriptors += (uint32_t)count;
    }
    return 0;
}

/* Send what is left of `out`, then look for an answer for a while: 0, or the errno that ended it. EAGAIN with all of it sent: none has
 * come, and the caller is to wait for it in a call that a signal ends; one that came during this one has its handler run first. */
EXPORTED int kvobj_exchange(
    exchange_t *x, int fd, const unsigned char *out, uint64_t size, void *in, uint64_t room, uint64_t awake_ns) {
    x->came = 0, x->flags = 0, x->descriptors = 0;
    while (x->sent < size) {
        ssize_t sent = send(fd, out + x->sent, size - x->sent, MSG_NOSIGNAL);
        if (sent < 0) return errno;
        x->sent += (uint64_t)sent;
        if (x->sent < size) return EINTR; /* a signal, or the time limit, has ended it */
    }
    uint64_t until = now_ns() + awake_ns;
    int ended;
    while ((ended = receive(x, fd, in, room)) == EAGAIN && now_ns() < until) sched_yield();
    return ended;
}

EXPORTED uint64_t kvobj_exchange_bytes(void) { return sizeof(exchange_t); }
