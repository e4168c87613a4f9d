/* Two processes: the first shares memory with the second, both by file descriptor and by IPC handle, and
 * waits on a device flag that the second sets. The second is the same program, started again by exec. They
 * take turns through a socket, so that the transcript has one order. */
#include "driver.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORDS 1024
#define PLAIN_BYTES ((size_t)3 << 20)

/* What the first process tells the second. */
typedef struct {
    CUipcMemHandle ipc;
    /* Of the same memory, by an address inside of it. */
    CUipcMemHandle inside;
    uint64_t bytes;
} Letter;

static void fail(const char *what)
{
    printf("%s: %s\n", what, strerror(errno));
    exit(1);
}

static void send_letter(int socket_fd, const Letter *letter, int fd)
{
    char control[CMSG_SPACE(sizeof fd)];
    struct iovec part = {(void *)letter, sizeof *letter};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    memset(control, 0, sizeof control);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    if (sendmsg(socket_fd, &message, 0) != (ssize_t)sizeof *letter)
        fail("sendmsg");
}

static int receive_letter(int socket_fd, Letter *letter)
{
    int fd = -1;
    char control[CMSG_SPACE(sizeof fd)];
    struct iovec part = {letter, sizeof *letter};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    if (recvmsg(socket_fd, &message, 0) != (ssize_t)sizeof *letter)
        fail("recvmsg");
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header == NULL || header->cmsg_type != SCM_RIGHTS)
        fail("no descriptor came");
    memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return fd;
}

/* Ends this process's turn, or waits for it. */
static void give_turn(int socket_fd)
{
    fflush(stdout);
    if (write(socket_fd, "t", 1) != 1)
        fail("write");
}

static void take_turn(int socket_fd)
{
    char turn;
    if (read(socket_fd, &turn, 1) != 1)
        fail("the other process is gone");
}

static CUhandle import_and_close(int fd)
{
    CUhandle handle = 0;
    OK(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_FD));
    close(fd);
    return handle;
}

static int second(int socket_fd)
{
    Letter letter;
    CUdeviceptr opened = 0;
    driver_start();
    int fd = receive_letter(socket_fd, &letter);
    CUhandle handle = import_and_close(fd);
    CUdeviceptr shared = driver_map(handle, letter.bytes);
    OK(cuMemRelease(handle));
    printf("second: sum of the import %llu\n", (unsigned long long)driver_sum(shared, WORDS, NULL));
    OK(cuIpcOpenMemHandle(&opened, letter.ipc, 1));
    printf("second: sum of the opened memory %llu\n", (unsigned long long)driver_sum(opened, WORDS, NULL));
    /* Opening is counted: one close leaves the other open. */
    CUdeviceptr again = 0;
    OK(cuIpcOpenMemHandle(&again, letter.inside, 1));
    int same = again == opened;
    OK(cuIpcCloseMemHandle(again));
    printf("second: opened again by an address inside, same %d\n", same);
    printf("second: freed %d, shared further %d\n", cuMemFree(opened) == CU_OK,
           cuIpcGetMemHandle(&letter.inside, opened) == CU_OK);
    driver_affine(shared, 2, 0, WORDS, NULL);
    driver_affine(opened, 3, 0, WORDS, NULL);
    OK(cuCtxSynchronize());
    /* The first process waits for this word, which lies behind the data. */
    CUdeviceptr flag = shared + letter.bytes - 4;
    uint32_t one = 1;
    void *params[] = {&flag, &one};
    printf("second: sets the flag\n");
    fflush(stdout);
    driver_launch("store_u32", NULL, params);
    OK(cuCtxSynchronize());
    take_turn(socket_fd);
    printf("second: sum after the owner let go %llu\n", (unsigned long long)driver_sum(shared, WORDS, NULL));
    driver_unmap(shared, letter.bytes);
    OK(cuIpcCloseMemHandle(opened));
    printf("second: closed once too often %d\n", cuIpcCloseMemHandle(opened) == CU_OK);
    give_turn(socket_fd);
    take_turn(socket_fd);
    return 0;
}

static int first(const char *program)
{
    int sockets[2], status = 0;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0)
        fail("socketpair");
    fflush(stdout);
    pid_t child = fork();
    if (child < 0)
        fail("fork");
    if (child == 0) {
        char number[16];
        close(sockets[0]);
        snprintf(number, sizeof number, "%d", sockets[1]);
        execl(program, program, number, (char *)NULL);
        fail("exec");
    }
    close(sockets[1]);

    CUprop prop = driver_prop();
    CUhandle handle = 0;
    CUdeviceptr plain = 0;
    CUstream stream = NULL;
    Letter letter;
    size_t granule = 0;
    int fd = -1;
    driver_start();
    OK(cuMemGetAllocationGranularity(&granule, &prop, 0));
    size_t before = driver_free_bytes();
    letter.bytes = granule;
    OK(cuMemCreate(&handle, granule, &prop, 0));
    CUdeviceptr shared = driver_map(handle, granule), flag = shared + granule - 4;
    driver_fill(shared, 5, WORDS, NULL);
    /* More than the smallest piece of memory that a pause can take, and less than two. */
    OK(cuMemAlloc(&plain, PLAIN_BYTES));
    driver_fill(plain, 6, WORDS, NULL);
    OK(cuIpcGetMemHandle(&letter.ipc, plain));
    OK(cuIpcGetMemHandle(&letter.inside, plain + PLAIN_BYTES - 4));
    OK(cuMemExportToShareableHandle(&fd, handle, CU_FD, 0));
    OK(cuCtxSynchronize());

    OK(cuStreamCreate(&stream, 1));
    void *params[] = {&flag};
    driver_launch("spin_until_nonzero", stream, params);
    printf("first: waiting %d\n", cuStreamQuery(stream) == CU_NOT_READY);
    fflush(stdout);
    send_letter(sockets[0], &letter, fd);
    close(fd);
    OK(cuStreamSynchronize(stream));
    printf("first: the flag came\n");
    printf("first: sum %llu", (unsigned long long)driver_sum(shared, WORDS, stream));
    printf(" and %llu\n", (unsigned long long)driver_sum(plain, WORDS, stream));
    OK(cuStreamDestroy(stream));
    driver_unmap(shared, granule);
    OK(cuMemRelease(handle));
    OK(cuCtxSynchronize());
    printf("first: let go\n");
    give_turn(sockets[0]);
    take_turn(sockets[0]);
    OK(cuMemFree(plain));
    printf("first: missing at the end %zu bytes\n", before - driver_free_bytes());
    give_turn(sockets[0]);
    if (waitpid(child, &status, 0) != child || status != 0)
        fail("second process");
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return second(atoi(argv[1]));
    return first(argv[0]);
}
