/* Transfers between files and memory that the kernel carries out by itself: see kvobj/tiers/nvme/kernel_queue.py, the one user.
 *
 * Linux native AIO. A transfer is begun by one call, which returns while it goes on, and told of through an eventfd. Nothing is kept
 * here but the kernel's context: whose memory it is, and what is under way, is the caller's.
 */
#define _GNU_SOURCE
#ifdef __linux__
#include <linux/fs.h>
#endif
#ifdef RWF_NOWAIT /* Linux 4.13; elsewhere kernel_queue.py finds no functions */
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define REAPED_MAX 64

enum { READ, WRITE, WRITE_DURABLY, FLUSH }; /* as kernel_queue.py numbers them */

/* A context for so many transfers at once in `context`; 0, or the error's negated number. */
EXPORTED int kvobj_disk_queue_open(int transfers, uint64_t *context) {
    aio_context_t made = 0;
    if (syscall(SYS_io_setup, transfers, &made)) return -errno;
    *context = made;
    return 0;
}

/* Begin a transfer of `page` bytes at `head` (may be none) and `size` bytes at `body` behind them, all multiples of what O_DIRECT
 * asks for. It never waits for the file system or for memory: what would is told of as EAGAIN, here or by the eventfd. `tag` comes
 * back with its outcome. 0, or the error's negated number: nothing was begun then. */
EXPORTED int kvobj_disk_queue_begin(uint64_t context, int event_fd, int kind, int fd, void *head, uint64_t page, void *body,
                                    uint64_t size, int64_t offset, uint64_t tag) {
    struct iovec parts[2] = {{head, page}, {body, size}};
    struct iocb transfer;
    struct iocb *transfers[1] = {&transfer};
    int skipped = page ? 0 : 1;

    memset(&transfer, 0, sizeof transfer);
    transfer.aio_data = tag;
    transfer.aio_fildes = (uint32_t)fd;
    transfer.aio_flags = IOCB_FLAG_RESFD;
    transfer.aio_resfd = (uint32_t)event_fd;
    if (kind == FLUSH) {
        transfer.aio_lio_opcode = IOCB_CMD_FDSYNC; /* always goes to a thread of the kernel's, and takes no flags */
    } else {
        transfer.aio_lio_opcode = kind == READ ? IOCB_CMD_PREADV : IOCB_CMD_PWRITEV;
        transfer.aio_rw_flags = RWF_NOWAIT | (kind == WRITE_DURABLY ? RWF_DSYNC : 0);
        transfer.aio_buf = (uint64_t)(uintptr_t)&parts[skipped]; /* copied before io_submit returns */
        transfer.aio_nbytes = (uint64_t)(2 - skipped);
        transfer.aio_offset = offset;
    }
    return syscall(SYS_io_submit, (aio_context_t)context, 1L, transfers) == 1 ? 0 : -errno;
}

/* Take the outcomes that are there, at most `most` of them, as tag and result (bytes, or the error's negated number); how many.
 * Never waits. Fewer than `most`: the eventfd, which was read before, tells of all others. */
EXPORTED int kvobj_disk_queue_reap(uint64_t context, int event_fd, int64_t *outcomes, int most) {
    struct io_event events[REAPED_MAX];
    struct timespec {
        int64_t seconds, nanoseconds;
    } now = {0, 0};
    uint64_t told;
    ssize_t read_bytes = read(event_fd, &told, sizeof told);
    (void)read_bytes; /* EAGAIN: told already */
    if (most > REAPED_MAX) most = REAPED_MAX;
    long count = syscall(SYS_io_getevents, (aio_context_t)context, 0L, (long)most, events, &now);
    for (long index = 0; index < count; index++) {
        outcomes[2 * index] = (int64_t)events[index].data;
        outcomes[2 * index + 1] = events[index].res;
    }
    return count < 0 ? 0 : (int)count;
}

/* Give the context back; waits for what is under way. */
EXPORTED void kvobj_disk_queue_close(uint64_t context) { syscall(SYS_io_destroy, (aio_context_t)context); }
#endif
