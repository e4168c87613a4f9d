/* Two processes, one a device, that make the driver calls of a communicator's life in the order of a
 * collective library: probe, buffers, channels shared both ways by descriptor, work, and teardown by
 * retain, release, range, unmap, release, free. Each prints one line of JSON at the end.
 *
 * With the argument `pause`, both pause and resume the tenant together three times in between. */
#define _GNU_SOURCE
#include "driver.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define OWN_BUFFERS 24
#define CHANNELS 12
#define WORDS 4096

typedef struct {
    CUdeviceptr address;
    size_t bytes;
} Buffer;

static int rank, peer_socket;
static size_t granule;
static Buffer own[OWN_BUFFERS], sent[2 * CHANNELS], received[2 * CHANNELS];

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

/* Both ranks stand at the same point. */
static void meet(void)
{
    char turn = 't';
    if (write(peer_socket, &turn, 1) != 1 || read(peer_socket, &turn, 1) != 1)
        fail("the other rank is gone");
}

static void send_fd(int fd, size_t bytes)
{
    char control[CMSG_SPACE(sizeof fd)];
    struct iovec part = {&bytes, sizeof bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    memset(control, 0, sizeof control);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    if (sendmsg(peer_socket, &message, 0) != (ssize_t)sizeof bytes)
        fail("sendmsg");
}

static int receive_fd(size_t *bytes)
{
    int fd = -1;
    char control[CMSG_SPACE(sizeof fd)];
    struct iovec part = {bytes, sizeof *bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    if (recvmsg(peer_socket, &message, MSG_WAITALL) != (ssize_t)sizeof *bytes)
        fail("recvmsg");
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header == NULL || header->cmsg_type != SCM_RIGHTS)
        fail("no descriptor came");
    memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return fd;
}

static CUprop buffer_prop(void)
{
    CUprop prop = driver_prop();
    prop.location.id = rank;
    prop.gpu_direct_rdma = 1;
    return prop;
}

static CUdeviceptr place(CUhandle handle, size_t bytes, size_t alignment)
{
    CUdeviceptr address = 0;
    CUaccess access = {{1, rank}, 3};
    OK(cuMemAddressReserve(&address, bytes, alignment, 0, 0));
    OK(cuMemMap(address, bytes, 0, handle, 0));
    OK(cuMemSetAccess(address, bytes, &access, 1));
    return address;
}

/* Memory whose handle stays held, as the library's allocator leaves it. */
static Buffer make(size_t bytes, CUhandle *handle)
{
    CUprop prop = buffer_prop();
    OK(cuMemCreate(handle, bytes, &prop, 0));
    Buffer buffer = {place(*handle, bytes, granule), bytes};
    return buffer;
}

static void destroy(Buffer buffer)
{
    CUhandle handle = 0;
    CUdeviceptr base = 0;
    size_t bytes = 0;
    OK(cuMemRetainAllocationHandle(&handle, (void *)buffer.address));
    OK(cuMemRelease(handle));
    OK(cuMemGetAddressRange(&base, &bytes, buffer.address));
    if (base != buffer.address || bytes != buffer.bytes)
        fail("the range is another");
    OK(cuMemUnmap(base, bytes));
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(base, bytes));
}

/* One message in flight each way, so that exports, imports and mappings of the two ranks interleave. */
static void connect_channel(int index, size_t bytes)
{
    CUhandle handle = 0, imported = 0;
    size_t their_bytes = 0;
    int fd = -1;
    sent[index] = make(bytes, &handle);
    OK(cuMemExportToShareableHandle(&fd, handle, CU_FD, 0));
    send_fd(fd, bytes);
    close(fd);
    fd = receive_fd(&their_bytes);
    OK(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd, CU_FD));
    close(fd);
    received[index].bytes = their_bytes;
    received[index].address = place(imported, their_bytes, 0);
}

/* A probe that is made and thrown away, as the library does to learn what the driver can. */
static void probe(void)
{
    CUprop prop = buffer_prop();
    CUhandle handle = 0;
    OK(cuMemCreate(&handle, granule, &prop, 0));
    OK(cuMemRelease(handle));
    OK(cuMemFree(0));
}

/* Writes into what the peer sees, and counts what did not arrive. */
static int exchange(uint32_t round)
{
    int wrong = 0;
    for (int i = 0; i < 2 * CHANNELS; i++)
        driver_fill(received[i].address, round * 1000 + (uint32_t)(i + 100 * rank), WORDS, NULL);
    OK(cuCtxSynchronize());
    meet();
    for (int i = 0; i < 2 * CHANNELS; i++) {
        uint64_t value = round * 1000 + (uint32_t)(i + 100 * (1 - rank));
        wrong += driver_sum(sent[i].address, WORDS, NULL) != value * WORDS;
    }
    meet();
    return wrong;
}

static int together(const char *name)
{
    int (*call)(void *) = (int (*)(void *))dlsym(RTLD_DEFAULT, name);
    return call(NULL);
}

static int life(int with_pauses, int *pauses)
{
    CUdeviceptr tensor = 0;
    CUhandle handle = 0;
    int wrong = 0;
    OK(cuMemAlloc(&tensor, 16 << 20));
    probe();
    for (int i = 0; i < OWN_BUFFERS; i++)
        own[i] = make(granule, &handle);
    for (int i = 0; i < CHANNELS; i++) {
        connect_channel(2 * i, 3 * granule);
        connect_channel(2 * i + 1, granule);
    }
    wrong += exchange(1);
    for (uint32_t round = 2; with_pauses && round < 5; round++) {
        *pauses += together("ncclPause") == 0 && together("ncclResume") == 0;
        wrong += exchange(round);
    }
    meet();
    for (int i = 2 * CHANNELS - 1; i >= 0; i--) {
        destroy(received[i]);
        destroy(sent[i]);
    }
    for (int i = OWN_BUFFERS - 1; i >= 0; i--)
        destroy(own[i]);
    OK(cuMemFree(tensor));
    return wrong;
}

static int run(int with_pauses)
{
    static char stats[1 << 16] = "null";
    CUcontext context = NULL;
    CUprop prop;
    int pauses = 0;
    driver_load();
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, rank));
    OK(cuCtxSetCurrent(context));
    prop = buffer_prop();
    OK(cuMemGetAllocationGranularity(&granule, &prop, 0));
    size_t before = driver_free_bytes();
    meet();
    int wrong = life(with_pauses, &pauses);
    /* The peer's imports of our memory are gone once it stands here too. */
    meet();
    size_t missing = before - driver_free_bytes();
    int64_t (*json)(char *, size_t) = (int64_t(*)(char *, size_t))dlsym(RTLD_DEFAULT, "sublet_stats_json");
    if (json != NULL && json(stats, sizeof stats) >= (int64_t)sizeof stats)
        fail("the statistics are too long");
    printf("{\"wrong\": %d, \"missing_bytes\": %zu, \"pauses\": %d, \"stats\": %s}\n", wrong, missing, pauses, stats);
    fflush(stdout);
    meet();
    return 0;
}

int main(int argc, char **argv)
{
    int sockets[2], status = 0;
    char number[16];
    if (argc < 2)
        return 2;
    if (argc > 2) {
        rank = 1;
        peer_socket = atoi(argv[2]);
        return run(strcmp(argv[1], "pause") == 0);
    }
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0)
        fail("socketpair");
    pid_t child = fork();
    if (child == 0) {
        close(sockets[0]);
        snprintf(number, sizeof number, "%d", sockets[1]);
        execl(argv[0], argv[0], argv[1], number, (char *)NULL);
        fail("exec");
    }
    close(sockets[1]);
    peer_socket = sockets[0];
    if (run(strcmp(argv[1], "pause") == 0) != 0 || waitpid(child, &status, 0) != child || status != 0)
        fail("the other rank");
    return 0;
}
