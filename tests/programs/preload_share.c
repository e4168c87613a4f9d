/* Two processes that hand memory to each other all the time, by files and by the driver's own handles, while both are paused and resumed:
 *
 *   preload_share SEED THREADS PAUSES
 *
 * Each thread of the first makes memory and hands it to a thread of the second, which looks at it, writes to it, and keeps some of it for longer than its
 * owner does. It prints the same with and without Sublet. */
#include "at_random.h"
#include "driver.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum { PAGE = 2 << 20, PAGES_MAX = 3, KEPT = 3, THREADS_MAX = 8 };

typedef struct {
    bool is_by_file;
    size_t bytes;
    unsigned word, next_word;
    CUipcMemHandle handle;
} Offer;

typedef struct {
    uint64_t random;
    int socket;
    CUstream stream;
} Worker;

typedef struct {
    CUdeviceptr address;
    size_t bytes;
    unsigned word;
} Import;

static CUcontext primary;
static atomic_bool is_over;
static atomic_uint begun;

static unsigned draw(Worker *worker, unsigned below)
{
    return random_below(&worker->random, below);
}

static void send_offer(int socket, const Offer *offer, int file)
{
    char room[CMSG_SPACE(sizeof file)] = {0};
    struct iovec part = {(void *)(uintptr_t)offer, sizeof *offer};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (file >= 0) {
        message.msg_control = room;
        message.msg_controllen = sizeof room;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof file)};
        memcpy(CMSG_DATA(header), &file, sizeof file);
    }
    if (sendmsg(socket, &message, 0) != (ssize_t)sizeof *offer) {
        printf("an offer was not sent\n");
        exit(1);
    }
}

/* The file that came with it, or -1. False at the end. */
static bool take_offer(int socket, Offer *offer, int *file)
{
    char room[CMSG_SPACE(sizeof *file)] = {0};
    struct iovec part = {offer, sizeof *offer};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    ssize_t came = recvmsg(socket, &message, MSG_WAITALL);
    *file = -1;
    if (came != (ssize_t)sizeof *offer)
        return false;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL)
        memcpy(file, CMSG_DATA(header), sizeof *file);
    return true;
}

static void check(Worker *worker, const char *who, CUdeviceptr address, size_t bytes, unsigned word)
{
    size_t places[2] = {0, bytes - 4};
    for (int i = 0; i < 2; i++) {
        unsigned found = 0;
        OK(cuMemcpyDtoHAsync(&found, address + places[i], 4, worker->stream));
        OK(cuStreamSynchronize(worker->stream));
        if (found != word) {
            printf("%s: byte %zu of %zu at %llx is of %u and not of %u\n", who, places[i], bytes,
                   (unsigned long long)address, found, word);
            exit(1);
        }
    }
}

static void fill(Worker *worker, CUdeviceptr address, size_t bytes, unsigned word)
{
    OK(cuMemsetD32Async(address, word, bytes / 4, worker->stream));
    OK(cuStreamSynchronize(worker->stream));
}

/* One allocation is made, handed over, looked at, and ended. */
static void hand_over(Worker *worker)
{
    Offer offer = {.is_by_file = draw(worker, 3) != 0, .bytes = PAGE * (1 + draw(worker, PAGES_MAX))};
    CUdeviceptr address = 0;
    char done = 0;
    int file = -1;
    offer.word = draw(worker, 1u << 30);
    offer.next_word = draw(worker, 1u << 30);
    if (offer.is_by_file) {
        CUprop prop = driver_prop();
        CUhandle handle = 0;
        OK(cuMemCreate(&handle, offer.bytes, &prop, 0));
        address = driver_map(handle, offer.bytes);
        OK(cuMemExportToShareableHandle(&file, handle, CU_FD, 0));
        OK(cuMemRelease(handle));
    } else {
        OK(cuMemAlloc(&address, offer.bytes));
        OK(cuIpcGetMemHandle(&offer.handle, address));
    }
    fill(worker, address, offer.bytes, offer.word);
    send_offer(worker->socket, &offer, file);
    if (file >= 0)
        close(file);
    if (recv(worker->socket, &done, 1, MSG_WAITALL) != 1) {
        printf("the other process has ended\n");
        exit(1);
    }
    check(worker, "owner", address, offer.bytes, offer.next_word);
    if (offer.is_by_file)
        driver_unmap(address, offer.bytes);
    else
        OK(cuMemFree(address));
}

static void begin(Worker *worker)
{
    OK(cuCtxSetCurrent(primary));
    OK(cuStreamCreate(&worker->stream, 1));
}

static void *give(void *argument)
{
    Worker *worker = argument;
    begin(worker);
    while (!is_over) {
        hand_over(worker);
        begun++;
    }
    OK(cuStreamDestroy(worker->stream));
    close(worker->socket);
    return NULL;
}

static void let_go(Worker *worker, Import *import)
{
    if (import->address == 0)
        return;
    check(worker, "importer", import->address, import->bytes, import->word);
    driver_unmap(import->address, import->bytes);
    import->address = 0;
}

static void *take(void *argument)
{
    Worker *worker = argument;
    Import kept[KEPT] = {{0}};
    Offer offer;
    int file = -1;
    begin(worker);
    while (take_offer(worker->socket, &offer, &file)) {
        Import import = {.bytes = offer.bytes, .word = offer.next_word};
        if (offer.is_by_file) {
            CUhandle handle = 0;
            OK(cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)file, CU_FD));
            close(file);
            import.address = driver_map(handle, offer.bytes);
            OK(cuMemRelease(handle));
        } else {
            OK(cuIpcOpenMemHandle(&import.address, offer.handle, 1));
        }
        check(worker, "importer at first", import.address, offer.bytes, offer.word);
        fill(worker, import.address, offer.bytes, offer.next_word);
        if (offer.is_by_file) {
            Import *place = &kept[draw(worker, KEPT)];
            let_go(worker, place);
            *place = import;
        } else {
            OK(cuIpcCloseMemHandle(import.address));
        }
        if (send(worker->socket, "", 1, 0) != 1)
            break;
    }
    for (int i = 0; i < KEPT; i++)
        let_go(worker, &kept[i]);
    OK(cuStreamDestroy(worker->stream));
    return NULL;
}

static void start(Worker *workers, pthread_t *threads, int many, uint64_t seed, void *(*body)(void *))
{
    driver_start();
    OK(cuDevicePrimaryCtxRetain(&primary, 0));
    for (int i = 0; i < many; i++) {
        workers[i].random = seed * 1000 + (unsigned)i;
        if (pthread_create(&threads[i], NULL, body, &workers[i]) != 0)
            exit(1);
    }
}

static void join(pthread_t *threads, int many)
{
    for (int i = 0; i < many; i++)
        pthread_join(threads[i], NULL);
}

int main(int count, char **words)
{
    static Worker workers[THREADS_MAX];
    pthread_t threads[THREADS_MAX];
    inside_deadline(240);
    if (count < 4)
        return 2;
    uint64_t seed = strtoull(words[1], NULL, 10);
    int many = atoi(words[2]), pauses = atoi(words[3]), first = 10;
    if (many > THREADS_MAX)
        return 2;
    if (count > 4) {
        for (int i = 0; i < many; i++)
            workers[i].socket = first + i;
        start(workers, threads, many, seed + 1, take);
        join(threads, many);
        return 0;
    }
    int theirs[THREADS_MAX];
    for (int i = 0; i < many; i++) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
            return 1;
        workers[i].socket = pair[0];
        theirs[i] = pair[1];
    }
    pid_t other = fork();
    if (other == 0) {
        /* Above all of them first, so that none is overwritten. */
        for (int i = 0; i < many; i++)
            theirs[i] = dup2(theirs[i], 100 + i);
        for (int i = 0; i < many; i++)
            dup2(theirs[i], first + i);
        for (int i = 0; i < many; i++)
            close(theirs[i]);
        execl("/proc/self/exe", words[0], words[1], words[2], words[3], "takes", (char *)NULL);
        _exit(1);
    }
    for (int i = 0; i < many; i++)
        close(theirs[i]);
    start(workers, threads, many, seed, give);
    while (begun < 10)
        usleep(1000);
    pause_at_random(seed, pauses);
    is_over = true;
    join(threads, many);
    int status = 0;
    waitpid(other, &status, 0);
    OK(cuCtxSetCurrent(primary));
    size_t left = 0, all = 0;
    OK(cuMemGetInfo(&left, &all));
    printf("share: the other ended with %d, and %zu bytes are in use\n", status, all - left);
    return 0;
}
