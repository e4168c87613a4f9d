/* How ranks share memory: a service thread in each exports on request and hands descriptors over by
 * SCM_RIGHTS, as NCCL's proxy does; the asking side knows nothing but the raw value of the handle. */
#ifndef SUBLET_TEST_RANK_SHARE_H
#define SUBLET_TEST_RANK_SHARE_H

#include "job.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

enum Kind { ASK_INFO = 1, ASK_EXPORT, FORWARD };

typedef struct {
    uint32_t kind;
    int32_t rank; /* whose memory a forwarded descriptor is */
    uint64_t handle;
} Request;

/* What a rank publishes of itself. */
typedef struct {
    CUhandle inbox[RANKS_MAX], window;
    CUipcMemHandle shared;
} Info;

/* Descriptors that came around the ring and wait for the main thread. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int fds[RANKS_MAX], owners[RANKS_MAX];
    unsigned count, taken;
} forwarded = {.lock = PTHREAD_MUTEX_INITIALIZER};

static Info own_info;

static void send_with_fd(int socket_fd, const void *bytes, size_t size, int fd)
{
    char control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {(void *)bytes, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    if (sendmsg(socket_fd, &message, MSG_NOSIGNAL) != (ssize_t)size)
        die("sendmsg to a peer: %s", strerror(errno));
}

/* Returns false when the peer is gone. `fd` is -1 when none came. */
static bool receive_with_fd(int socket_fd, void *bytes, size_t size, int *fd)
{
    char control[CMSG_SPACE(sizeof *fd)];
    struct iovec part = {bytes, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    *fd = -1;
    if (recvmsg(socket_fd, &message, MSG_CMSG_CLOEXEC) != (ssize_t)size)
        return false;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(header), sizeof *fd);
    return true;
}

static struct sockaddr_un address_of(int rank)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length = snprintf(address.sun_path, sizeof address.sun_path, "%s/rank%d", job.dir, rank);
    if (length >= (int)sizeof address.sun_path)
        die("the path %s is too long for a socket", job.dir);
    return address;
}

static void limit_waits(int socket_fd)
{
    struct timeval limit = {WAIT_SECONDS, 0};
    if (setsockopt(socket_fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) != 0)
        die("SO_RCVTIMEO: %s", strerror(errno));
    if (setsockopt(socket_fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) != 0)
        die("SO_SNDTIMEO: %s", strerror(errno));
}

static void keep_forwarded(int owner, int fd)
{
    pthread_mutex_lock(&forwarded.lock);
    if (forwarded.count == RANKS_MAX)
        die("more descriptors came around than there are ranks");
    forwarded.owners[forwarded.count] = owner;
    forwarded.fds[forwarded.count++] = fd;
    pthread_cond_signal(&forwarded.changed);
    pthread_mutex_unlock(&forwarded.lock);
}

static void serve(int peer)
{
    Request request;
    int fd = -1;
    limit_waits(peer);
    if (!receive_with_fd(peer, &request, sizeof request, &fd))
        return;
    int32_t code = 0;
    switch (request.kind) {
    case ASK_INFO:
        send_with_fd(peer, &own_info, sizeof own_info, -1);
        break;
    case ASK_EXPORT:
        /* The driver's code goes back too: a peer may ask for what has been freed. */
        code = cuMemExportToShareableHandle(&fd, request.handle, CU_FD, 0);
        send_with_fd(peer, &code, sizeof code, code == CU_OK ? fd : -1);
        if (code == CU_OK)
            close(fd);
        break;
    case FORWARD:
        keep_forwarded(request.rank, fd);
        send_with_fd(peer, &code, sizeof code, -1);
        break;
    default:
        die("a peer requested %u", request.kind);
    }
}

static void *service(void *argument)
{
    int listener = (int)(intptr_t)argument;
    OK(cuCtxSetCurrent(job.context));
    for (;;) {
        int peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (peer < 0 && errno != EINTR)
            die("accept: %s", strerror(errno));
        if (peer >= 0) {
            serve(peer);
            close(peer);
        }
    }
    return NULL;
}

static void start_service(void)
{
    pthread_t thread;
    pthread_condattr_t attributes;
    struct sockaddr_un address = address_of(job.rank);
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 64) != 0)
        die("%s: %s", address.sun_path, strerror(errno));
    for (int from = 0; from < job.ranks; from++)
        own_info.inbox[from] = job.inbox[from].handle;
    own_info.window = job.window.handle;
    OK(cuIpcGetMemHandle(&own_info.shared, job.shared));
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&forwarded.changed, &attributes);
    if (pthread_create(&thread, NULL, service, (void *)(intptr_t)listener) != 0)
        die("no thread");
}

/* Sends one request to `rank`, with `fd` unless that is -1, and waits for its answer. */
static int ask(int rank, Request request, int fd, void *answer, size_t size)
{
    struct sockaddr_un address = address_of(rank);
    int received = -1, peer = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    limit_waits(peer);
    if (connect(peer, (struct sockaddr *)&address, sizeof address) != 0)
        die("rank %d cannot be reached: %s", rank, strerror(errno));
    send_with_fd(peer, &request, sizeof request, fd);
    if (!receive_with_fd(peer, answer, size, &received))
        die("rank %d did not answer within %d s", rank, WAIT_SECONDS);
    close(peer);
    return received;
}

/* A descriptor of memory that `rank` knows as `handle`. */
static int fd_of_peer(int rank, CUhandle handle)
{
    int32_t code = 0;
    int fd = ask(rank, (Request){.kind = ASK_EXPORT, .handle = handle}, -1, &code, sizeof code);
    if (code != CU_OK || fd < 0)
        die("rank %d did not export: %s", rank, driver_error(code));
    return fd;
}

static Info info_of_peer(int rank)
{
    Info info;
    ask(rank, (Request){.kind = ASK_INFO}, -1, &info, sizeof info);
    return info;
}

static void forward(int rank, int owner, int fd)
{
    int32_t code = 0;
    ask(rank, (Request){.kind = FORWARD, .rank = owner}, fd, &code, sizeof code);
}

static int take_forwarded(int *owner)
{
    struct timespec deadline = seconds_from_now(WAIT_SECONDS);
    pthread_mutex_lock(&forwarded.lock);
    while (forwarded.taken == forwarded.count)
        if (pthread_cond_timedwait(&forwarded.changed, &forwarded.lock, &deadline) == ETIMEDOUT)
            die("no descriptor came around the ring within %d s", WAIT_SECONDS);
    int fd = forwarded.fds[forwarded.taken];
    *owner = forwarded.owners[forwarded.taken++];
    pthread_mutex_unlock(&forwarded.lock);
    return fd;
}

static CUhandle import_and_close(int fd)
{
    CUhandle handle = 0;
    OK(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_FD));
    close(fd);
    return handle;
}

/* Maps what `fd` stands for and lets the handle go: from here on the mapping alone keeps the memory. */
static CUdeviceptr import_map_release(int fd)
{
    CUhandle handle = import_and_close(fd);
    CUdeviceptr address = map_here(handle, BUFFER_BYTES);
    OK(cuMemRelease(handle));
    return address;
}

/* As torch gathers the descriptors of symmetric memory: each rank passes on what it receives. */
static void pass_around(void)
{
    int next = (job.rank + 1) % job.ranks, own = -1;
    OK(cuMemExportToShareableHandle(&own, job.ring.handle, CU_FD, 0));
    forward(next, job.rank, own);
    close(own);
    for (int hop = 1; hop < job.ranks; hop++) {
        int owner = -1, fd = take_forwarded(&owner);
        if (hop < job.ranks - 1)
            forward(next, owner, fd);
        job.peer_ring[owner] = import_map_release(fd);
    }
}

static void connect_to_peers(void)
{
    int own = -1;
    OK(cuMemExportToShareableHandle(&own, job.inbox[job.rank].handle, CU_FD, 0));
    job.self_inbox = import_map_release(own);
    for (int hop = 1; hop < job.ranks; hop++) {
        int peer = (job.rank + hop) % job.ranks;
        Info info = info_of_peer(peer);
        CUhandle handle = import_and_close(fd_of_peer(peer, info.inbox[job.rank]));
        job.outbox[peer] = (Buffer){handle, map_here(handle, BUFFER_BYTES)};
        job.peer_window[peer] = import_map_release(fd_of_peer(peer, info.window));
        if (hop == 1)
            OK(cuIpcOpenMemHandle(&job.peer_shared, info.shared, 1));
    }
    if (job.ranks > 1)
        pass_around();
    job.connected = true;
}

#endif
