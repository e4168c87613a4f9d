/* How the ranks of a communicator meet on the host: a file that all map, and one socket each, over which
 * descriptors go. Both lie in the directory that SIMNCCL_DIR names. */
#ifndef SUBLET_TEST_SIMNCCL_BOOTSTRAP_H
#define SUBLET_TEST_SIMNCCL_BOOTSTRAP_H

#include "../../simcuda/programs/driver.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define RANKS_MAX 8
#define MEET_SECONDS 120

/* What all ranks of a communicator map. */
typedef struct {
    _Atomic uint32_t arrivals;
    _Atomic uint32_t aborted;
    int color[RANKS_MAX], key[RANKS_MAX];
} Meeting;

__attribute__((format(printf, 1, 2), noreturn)) static void stop(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    printf("fail simulated NCCL: ");
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
    fflush(stdout);
    _exit(1);
}

static const char *directory(void)
{
    const char *found = getenv("SIMNCCL_DIR");
    if (found == NULL)
        stop("SIMNCCL_DIR is not set");
    return found;
}

/* A name that is the same for the same words, and short enough for a socket. */
static uint64_t hashed(uint64_t hash, const void *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    return hash;
}

static Meeting *map_meeting(uint64_t name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%016llx", directory(), (unsigned long long)name);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(Meeting)) != 0)
        stop("%s: %s", path, strerror(errno));
    Meeting *meeting = mmap(NULL, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (meeting == MAP_FAILED)
        stop("mapping %s: %s", path, strerror(errno));
    close(fd);
    return meeting;
}

/* Waits until all ranks have come here as often as this one: `times` times. */
static void meet(Meeting *meeting, int ranks, uint32_t times)
{
    _Atomic uint32_t *arrivals = &meeting->arrivals;
    uint32_t wanted = times * (uint32_t)ranks;
    struct timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += MEET_SECONDS;
    if (atomic_fetch_add(arrivals, 1) + 1 == wanted)
        syscall(SYS_futex, arrivals, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    for (uint32_t seen = atomic_load(arrivals); seen < wanted; seen = atomic_load(arrivals)) {
        long code = syscall(SYS_futex, arrivals, FUTEX_WAIT_BITSET, seen, &deadline, NULL, FUTEX_BITSET_MATCH_ANY);
        if (code != 0 && errno == ETIMEDOUT)
            stop("a peer did not come within %d s: %u of %u arrivals", MEET_SECONDS, seen, wanted);
    }
}

static struct sockaddr_un socket_of(uint64_t name, int rank)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length = snprintf(address.sun_path, sizeof address.sun_path, "%s/%016llx.%d", directory(),
                          (unsigned long long)name, rank);
    if (length >= (int)sizeof address.sun_path)
        stop("the path %s is too long for a socket", directory());
    return address;
}

static int listen_as(uint64_t name, int rank)
{
    struct sockaddr_un address = socket_of(name, rank);
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, RANKS_MAX) != 0)
        stop("%s: %s", address.sun_path, strerror(errno));
    return listener;
}

/* Sends `fd` to `rank`, which has begun to listen; does not wait for it. */
static void give_fd(uint64_t name, int own_rank, int rank, int fd)
{
    struct sockaddr_un address = socket_of(name, rank);
    char control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {&own_rank, sizeof own_rank};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    int peer = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (connect(peer, (struct sockaddr *)&address, sizeof address) != 0)
        stop("rank %d cannot be reached: %s", rank, strerror(errno));
    if (sendmsg(peer, &message, MSG_NOSIGNAL) != (ssize_t)sizeof own_rank)
        stop("sendmsg to rank %d: %s", rank, strerror(errno));
    close(peer);
}

/* The next descriptor that comes, and whose. */
static int take_fd(int listener, int *rank)
{
    int fd = -1, peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    char control[CMSG_SPACE(sizeof fd)];
    struct iovec part = {rank, sizeof *rank};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    if (peer < 0 || recvmsg(peer, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *rank)
        stop("no descriptor came: %s", strerror(errno));
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header == NULL || header->cmsg_type != SCM_RIGHTS)
        stop("a message without a descriptor came");
    memcpy(&fd, CMSG_DATA(header), sizeof fd);
    close(peer);
    return fd;
}

#endif
