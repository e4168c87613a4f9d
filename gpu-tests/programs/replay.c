// The driver calls of NCCL's communicators between processes on one GPU, replayed: replay_calls.h says which, in what order.
//
// Communicator c is between the two processes of pair c % pairs. In each step one communicator ends and is made again, and a
// quarter of all are written, half of the shared blocks by the process that has imported them. Then each process compares every
// word of its own blocks and of its imports, and asks the driver for the handle and the range behind each address. Words differ
// by block, position and step; a third of the blocks that no peer sees stays zero. A thread exports for peers, as NCCL's proxy does.
//
// Driver calls alone. The file that loads this gives it the name of NCCL's library, by which callers are told apart.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "replay_calls.h"
#include "replay_driver.h"

enum { RANKS_MAX = 8, COMMUNICATORS_MAX = 64, WAIT_S = 120, WRITTEN_EVERY = 4 };
enum { OWN_MAX = 98 + 2 * (24 + 32), IMPORTS_MAX = 2 * (24 + 32), BLOCKS_MAX = OWN_MAX + IMPORTS_MAX };
enum { GRID = 64, BLOCK = 256 };

struct block {
    uint64_t handle, address;
    size_t bytes;
    enum group_name group;
    unsigned index; // in its owner's memory of the communicator
};

struct communicator {
    unsigned number, pair, side; // side is 0 in the lower of its two ranks
    unsigned made_in, written_in; // steps
    atomic_uint ready; // own blocks of `made_in` that peers may fetch
    unsigned own_count, import_count;
    struct block own[OWN_MAX], imports[IMPORTS_MAX];
    void *host[HOST_BLOCKS];
};

// What every process sees; a file.
struct shared {
    atomic_uint arrived;
};

struct request {
    uint32_t communicator, made_in, index;
};

static struct {
    unsigned rank, ranks, parts, count, step;
    struct communicator *communicators;
    struct shared *shared;
    unsigned barriers;
    void *context, *stream, *fill, *compare;
    uint64_t wrong_words; // on the device, one for each block of a communicator
    uint64_t tensors[TENSORS];
    unsigned long folder; // what names this job's sockets
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char failure[400];
} job = {.lock = PTHREAD_MUTEX_INITIALIZER};

// Says what failed, and is 0.
static int failed(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(job.failure, sizeof job.failure, format, arguments);
    va_end(arguments);
    return 0;
}

// Leaves the function with what failed when a call does.
#define CALL(name, ...)                                                                                                \
    do {                                                                                                               \
        const int code_ = name(__VA_ARGS__);                                                                           \
        if (code_ != 0)                                                                                                \
            return failed("rank %u, step %u, %s:%d: %s returned %d", job.rank, job.step, __func__, __LINE__, #name,    \
                          code_);                                                                                      \
    } while (0)

// ---------------------------------------------------------------- what a block must hold

struct pattern {
    uint32_t first, step; // word i is first + i * step
};

static struct pattern pattern_of(const struct communicator *c, unsigned owner, const struct block *b) {
    if (b->group == IN_CHANNELS && b->index % BLOCKS_PER_CHANNEL == 2) return (struct pattern){0, 0};
    const uint64_t name = ((uint64_t)c->written_in << 24) ^ (c->number << 16) ^ (owner << 15) ^ b->index;
    uint64_t mixed = (name + 1) * 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 31)) * 0xbf58476d1ce4e5b9;
    return (struct pattern){(uint32_t)(mixed >> 32), (uint32_t)mixed | 1};
}

// One of the two kernels on all words of a block; `out` is the counter's address, or null where there is none.
static int launch_on(void *kernel, struct block *b, struct pattern p, uint64_t *out) {
    uint64_t words = b->bytes / sizeof(uint32_t);
    void *arguments[] = {out, &b->address, &p.first, &p.step, &words};
    void **given = out == NULL ? arguments + 1 : arguments;
    CALL(cuLaunchKernel, kernel, GRID, 1, 1, BLOCK, 1, 1, 0, job.stream, given, NULL);
    return 1;
}

static int fill(const struct communicator *c, unsigned owner, struct block *b) {
    return launch_on(job.fill, b, pattern_of(c, owner, b), NULL);
}

static int name_wrong_word(const struct communicator *c, unsigned owner, const struct block *b, uint64_t count) {
    const struct pattern p = pattern_of(c, owner, b);
    const size_t words = b->bytes / sizeof(uint32_t);
    uint32_t *seen = malloc(b->bytes), i = 0;
    if (seen == NULL) return failed("no host memory");
    CALL(cuMemcpyDtoH, seen, b->address, b->bytes);
    while (i < words - 1 && seen[i] == p.first + i * p.step) i++;
    return failed("rank %u, step %u: communicator %u, %s %u of %s at %#llx: %llu of %zu words differ; word %u is %#x, not %#x",
                  job.rank, job.step, c->number, groups[b->group].name, b->index, owner == c->side ? "its own" : "its peer",
                  (unsigned long long)b->address, (unsigned long long)count, words, i, seen[i], p.first + i * p.step);
}

// ---------------------------------------------------------------- one block

static int map(struct block *b, size_t alignment) {
    const struct access access = {{ON_DEVICE, 0}, READ_WRITE};
    CALL(cuMemAddressReserve, &b->address, b->bytes, alignment, 0, 0);
    CALL(cuMemMap, b->address, b->bytes, 0, b->handle, 0);
    CALL(cuMemSetAccess, b->address, b->bytes, &access, 1);
    return 1;
}

static int create(struct communicator *c, enum group_name group, unsigned count) {
    const struct properties device = {PINNED, FILE_DESCRIPTOR, {ON_DEVICE, 0}, NULL, 0, 1, 0, {0}};
    for (unsigned i = 0; i < count; i++) {
        struct block *b = &c->own[c->own_count];
        *b = (struct block){.bytes = groups[group].bytes, .group = group, .index = c->own_count};
        CALL(cuMemCreate, &b->handle, b->bytes, &device, 0);
        if (!map(b, groups[IN_CHANNELS].bytes) || !fill(c, c->side, b)) return 0;
        c->own_count++;
    }
    return 1;
}

static int release(struct block *b) {
    uint64_t handle = 0, base = 0;
    size_t bytes = 0;
    CALL(cuMemRetainAllocationHandle, &handle, (void *)b->address);
    CALL(cuMemRelease, handle);
    CALL(cuMemGetAddressRange, &base, &bytes, b->address);
    CALL(cuMemUnmap, base, bytes);
    CALL(cuMemRelease, b->handle);
    CALL(cuMemAddressFree, base, bytes);
    b->address = 0;
    return 1;
}

// The driver has the same handle and range at the address as when it was mapped.
static int is_in_place(const struct communicator *c, const struct block *b) {
    uint64_t handle = 0, base = 0;
    size_t bytes = 0;
    const int code = b->address == 0 ? -1 : cuMemRetainAllocationHandle(&handle, (void *)b->address);
    if (code != 0)
        return failed("rank %u, step %u: communicator %u, %s %u: nothing is mapped at %#llx: %d", job.rank, job.step,
                      c->number, groups[b->group].name, b->index, (unsigned long long)b->address, code);
    CALL(cuMemRelease, handle);
    CALL(cuMemGetAddressRange, &base, &bytes, b->address);
    if (handle != b->handle || base != b->address || bytes != b->bytes)
        return failed("rank %u, step %u: communicator %u, %s %u: handle %#llx at %#llx+%zu, not %#llx at %#llx+%zu", job.rank,
                      job.step, c->number, groups[b->group].name, b->index, (unsigned long long)handle,
                      (unsigned long long)base, bytes, (unsigned long long)b->handle, (unsigned long long)b->address, b->bytes);
    return 1;
}

// ---------------------------------------------------------------- between processes

static struct timespec deadline(clockid_t clock) {
    struct timespec when;
    clock_gettime(clock, &when);
    when.tv_sec += WAIT_S;
    return when;
}

// All processes have come as far.
static int barrier(void) {
    const unsigned wanted = ++job.barriers * job.ranks;
    const struct timespec limit = deadline(CLOCK_MONOTONIC);
    atomic_fetch_add(&job.shared->arrived, 1);
    syscall(SYS_futex, &job.shared->arrived, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    for (unsigned seen; (int)((seen = atomic_load(&job.shared->arrived)) - wanted) < 0;) {
        const long code = syscall(SYS_futex, &job.shared->arrived, FUTEX_WAIT_BITSET, seen, &limit, NULL, FUTEX_BITSET_MATCH_ANY);
        if (code != 0 && errno == ETIMEDOUT)
            return failed("rank %u, step %u: the other ranks did not come within %d s", job.rank, job.step, WAIT_S);
    }
    return 1;
}

// A name in the abstract namespace, so that the folder's path may be long.
static socklen_t address_of(unsigned rank, struct sockaddr_un *address) {
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    const int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "replay-%lx-%u", job.folder, rank);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

// Sends the driver's code, and a descriptor unless it is -1.
static void answer(int peer, int code, int fd) {
    char control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {&code, sizeof code};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control, message.msg_controllen = sizeof control;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        *header = (struct cmsghdr){CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    // A peer that has gone says so by its own exit code.
    (void)!sendmsg(peer, &message, MSG_NOSIGNAL);
}

// Waits until the block is there; null when it does not come.
static struct block *asked_for(const struct request *request) {
    const struct timespec limit = deadline(CLOCK_REALTIME);
    struct communicator *c = &job.communicators[request->communicator % job.count];
    int code = 0;
    pthread_mutex_lock(&job.lock);
    while (code == 0 && !(c->made_in == request->made_in && atomic_load(&c->ready) > request->index))
        code = pthread_cond_timedwait(&job.changed, &job.lock, &limit);
    pthread_mutex_unlock(&job.lock);
    return code == 0 ? &c->own[request->index] : NULL;
}

// Exports what the peers of a connection ask for, until it ends.
static void *serve(void *argument) {
    const int peer = (int)(intptr_t)argument;
    struct request request;
    while (cuCtxSetCurrent(job.context) == 0 && recv(peer, &request, sizeof request, MSG_WAITALL) == sizeof request) {
        int fd = -1;
        struct block *b = asked_for(&request);
        const int code = b == NULL ? -1 : cuMemExportToShareableHandle(&fd, b->handle, FILE_DESCRIPTOR, 0);
        answer(peer, code, code == 0 ? fd : -1);
        if (code == 0) close(fd);
    }
    close(peer);
    return NULL;
}

static void *listen_for_peers(void *argument) {
    const int listener = (int)(intptr_t)argument;
    pthread_t thread;
    for (int peer; (peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) >= 0 || errno == EINTR;)
        if (peer >= 0 && pthread_create(&thread, NULL, serve, (void *)(intptr_t)peer) == 0) pthread_detach(thread);
    return NULL;
}

static int connection_to(unsigned rank) {
    static int connections[RANKS_MAX];
    if (connections[rank] != 0) return connections[rank];
    struct sockaddr_un address;
    const socklen_t length = address_of(rank, &address);
    const struct timeval limit = {WAIT_S, 0};
    const int peer = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (connect(peer, (struct sockaddr *)&address, length) != 0)
        return failed("rank %u cannot be reached: %s", rank, strerror(errno));
    return connections[rank] = peer;
}

static int import(struct communicator *c, unsigned peer, const struct block *like) {
    char control[CMSG_SPACE(sizeof(int))];
    int code = -1, fd = -1;
    struct iovec part = {&code, sizeof code};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    const struct request request = {c->number, c->made_in, like->index};
    const int connection = connection_to(peer);
    if (connection == 0) return 0;
    if (send(connection, &request, sizeof request, MSG_NOSIGNAL) != sizeof request ||
        recvmsg(connection, &message, MSG_CMSG_CLOEXEC) != sizeof code || code != 0 || CMSG_FIRSTHDR(&message) == NULL)
        return failed("rank %u, step %u: rank %u did not export block %u of communicator %u: %d", job.rank, job.step, peer,
                      like->index, c->number, code);
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    struct block *b = &c->imports[c->import_count];
    *b = *like, b->handle = b->address = 0;
    CALL(cuMemImportFromShareableHandle, &b->handle, (void *)(intptr_t)fd, FILE_DESCRIPTOR);
    close(fd);
    if (!map(b, 0)) return 0;
    c->import_count++;
    return 1;
}

// ---------------------------------------------------------------- one communicator

// How many of `channels` a run of so many parts has.
static unsigned part_of(unsigned channels) {
    return channels < job.parts ? 1 : channels / job.parts;
}

static unsigned pair_count(void) {
    return job.ranks * (job.ranks - 1) / 2;
}

// The rank on this side of a pair.
static unsigned rank_of(unsigned pair, unsigned side) {
    unsigned low = 0;
    for (unsigned rest = job.ranks - 1; pair >= rest; rest--) pair -= rest, low++;
    return side == 0 ? low : low + 1 + pair;
}

static int is_mine(const struct communicator *c) {
    return rank_of(c->pair, c->side) == job.rank;
}

// Buffers and flags of a connection: created, then exchanged by the channel.
static int connect_by(struct communicator *c, enum group_name buffers, unsigned channels) {
    const unsigned first = c->own_count, peer = rank_of(c->pair, 1 - c->side);
    if (!create(c, buffers, channels) || !create(c, buffers + 1, channels)) return 0;
    // Others see it when its contents are written.
    CALL(cuStreamSynchronize, job.stream);
    pthread_mutex_lock(&job.lock);
    atomic_store(&c->ready, c->own_count);
    pthread_cond_broadcast(&job.changed);
    pthread_mutex_unlock(&job.lock);
    for (unsigned k = 0; k < channels; k++)
        if (!import(c, peer, &c->own[first + k]) || !import(c, peer, &c->own[first + channels + k])) return 0;
    return 1;
}

static int make(struct communicator *c) {
    const struct properties on_host = {PINNED, FILE_DESCRIPTOR, {ON_HOST_NUMA, 0}, NULL, 0, 0, 0, {0}};
    uint64_t trial = 0;
    pthread_mutex_lock(&job.lock);
    c->made_in = c->written_in = job.step;
    atomic_store(&c->ready, 0);
    pthread_mutex_unlock(&job.lock);
    c->own_count = c->import_count = 0;
    // A machine without such host memory refuses it, and NCCL goes on without.
    if (cuMemCreate(&trial, groups[IN_CHANNELS].bytes, &on_host, 0) == 0) CALL(cuMemRelease, trial);
    CALL(cuMemFree, 0);
    CALL(cuMemHostAlloc, &c->host[0], host_bytes[0], HOST_DEVICEMAP);
    if (!create(c, IN_CHANNELS, BLOCKS_PER_CHANNEL * part_of(CHANNELS) + FURTHER_BLOCKS)) return 0;
    for (unsigned i = 1; i < HOST_BLOCKS; i++) CALL(cuMemHostAlloc, &c->host[i], host_bytes[i], HOST_DEVICEMAP);
    return connect_by(c, RING_BUFFERS, part_of(RING_CHANNELS)) && connect_by(c, PEER_BUFFERS, part_of(PEER_CHANNELS));
}

static int end(struct communicator *c) {
    const unsigned channels = part_of(CHANNELS), ring = part_of(RING_CHANNELS), peer = part_of(PEER_CHANNELS);
    const unsigned alone = BLOCKS_PER_CHANNEL * channels + FURTHER_BLOCKS;
    for (unsigned i = alone; i < c->own_count; i++)
        if (!release(&c->own[i])) return 0;
    for (unsigned k = 0; k < (ring > peer ? ring : peer); k++) {
        for (unsigned i = 0; i < 2 && k < ring; i++)
            if (!release(&c->imports[2 * k + i])) return 0;
        for (unsigned i = 0; i < 2 && k < peer; i++)
            if (!release(&c->imports[2 * (ring + k) + i])) return 0;
    }
    for (unsigned k = 0; k < channels; k++)
        if (!release(&c->own[BLOCKS_PER_CHANNEL * ((k + channels - ring) % channels)])) return 0;
    for (unsigned i = alone; i-- > 0;)
        if (c->own[i].address != 0 && !release(&c->own[i])) return 0;
    for (unsigned i = 0; i < HOST_BLOCKS; i++) CALL(cuMemFreeHost, c->host[i]);
    return 1;
}

// Half of the shared blocks by the process that has imported them, and the other half in the next step.
static int write_contents(struct communicator *c) {
    c->written_in = job.step;
    for (unsigned i = 0; i < c->own_count; i++) {
        struct block *b = &c->own[i];
        if ((b->group == IN_CHANNELS || (b->index + job.step) % 2 == 0) && !fill(c, c->side, b)) return 0;
    }
    for (unsigned i = 0; i < c->import_count; i++) {
        struct block *b = &c->imports[i];
        if ((b->index + job.step) % 2 == 1 && !fill(c, 1 - c->side, b)) return 0;
    }
    return 1;
}

static int verify(struct communicator *c, uint64_t *words) {
    uint64_t wrong[BLOCKS_MAX] = {0};
    const unsigned own = c->own_count, all = own + c->import_count;
    CALL(cuMemsetD32Async, job.wrong_words, 0, 2 * BLOCKS_MAX, job.stream);
    for (unsigned i = 0; i < all; i++) {
        struct block *b = i < own ? &c->own[i] : &c->imports[i - own];
        uint64_t out = job.wrong_words + i * sizeof(uint64_t);
        const struct pattern p = pattern_of(c, i < own ? c->side : 1 - c->side, b);
        if (!is_in_place(c, b) || !launch_on(job.compare, b, p, &out)) return 0;
        *words += b->bytes / sizeof(uint32_t);
    }
    CALL(cuStreamSynchronize, job.stream);
    CALL(cuMemcpyDtoH, wrong, job.wrong_words, sizeof wrong);
    for (unsigned i = 0; i < all; i++)
        if (wrong[i] != 0)
            return name_wrong_word(c, i < own ? c->side : 1 - c->side, i < own ? &c->own[i] : &c->imports[i - own], wrong[i]);
    return 1;
}

// Tensors of the application, in addition to the communicators, each a pattern of its own that stays.
static struct block tensor(unsigned i) {
    return (struct block){.address = job.tensors[i], .bytes = tensor_bytes[i] / job.parts, .index = i};
}

static int make_tensors(void) {
    for (unsigned i = 0; i < TENSORS; i++) {
        CALL(cuMemAlloc, &job.tensors[i], tensor_bytes[i] / job.parts);
        struct block b = tensor(i);
        if (!launch_on(job.fill, &b, (struct pattern){i + 1, 2 * i + 1}, NULL)) return 0;
    }
    return 1;
}

static int verify_tensors(uint64_t *words) {
    uint64_t wrong[TENSORS] = {0};
    CALL(cuMemsetD32Async, job.wrong_words, 0, 2 * TENSORS, job.stream);
    for (unsigned i = 0; i < TENSORS; i++) {
        struct block b = tensor(i);
        uint64_t out = job.wrong_words + i * sizeof wrong[0];
        if (!launch_on(job.compare, &b, (struct pattern){i + 1, 2 * i + 1}, &out)) return 0;
        *words += b.bytes / sizeof(uint32_t);
    }
    CALL(cuStreamSynchronize, job.stream);
    CALL(cuMemcpyDtoH, wrong, job.wrong_words, sizeof wrong);
    for (unsigned i = 0; i < TENSORS; i++)
        if (wrong[i] != 0)
            return failed("rank %u, step %u: tensor %u: %llu words differ", job.rank, job.step, i, (unsigned long long)wrong[i]);
    return 1;
}

// ---------------------------------------------------------------- faults that must be noticed

// REPLAY_FAULT: what rank 0 does wrong in the fourth step, to show that it is seen.
static int do_wrong(const char *fault) {
    struct communicator *c = &job.communicators[1 % job.count];
    struct block *b = &c->imports[0];
    if (strcmp(fault, "byte") == 0) {
        const size_t at = b->bytes / 2 + 1;
        unsigned char byte = 0;
        CALL(cuMemcpyDtoH, &byte, b->address + at, 1);
        byte ^= 0x10;
        CALL(cuMemcpyHtoD, b->address + at, &byte, 1);
        return 1;
    }
    if (strcmp(fault, "address") == 0) {
        struct block other = *b;
        CALL(cuMemUnmap, b->address, b->bytes);
        return map(&other, 0);
    }
    if (strcmp(fault, "left out") == 0) return end(c);
    return failed("REPLAY_FAULT is byte, address or left out");
}

// ---------------------------------------------------------------- all of it

static int open_folder(const char *folder) {
    char path[300];
    struct stat found;
    snprintf(path, sizeof path, "%s/replay.shared", folder);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof *job.shared) != 0 || fstat(fd, &found) != 0)
        return failed("%s: %s", path, strerror(errno));
    job.shared = mmap(NULL, sizeof *job.shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (job.shared == MAP_FAILED) return failed("%s: %s", path, strerror(errno));
    job.folder = (unsigned long)found.st_dev << 32 ^ (unsigned long)found.st_ino;
    return 1;
}

static int start_service(void) {
    pthread_t thread;
    struct sockaddr_un address;
    const socklen_t length = address_of(job.rank, &address);
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&address, length) != 0 || listen(listener, RANKS_MAX) != 0)
        return failed("rank %u has no socket: %s", job.rank, strerror(errno));
    pthread_cond_init(&job.changed, NULL);
    if (pthread_create(&thread, NULL, listen_for_peers, (void *)(intptr_t)listener) != 0) return failed("no thread");
    return 1;
}

static int open_device(void) {
    void *module = NULL;
    CALL(cuInit, 0);
    CALL(cuDevicePrimaryCtxRetain, &job.context, 0);
    CALL(cuCtxSetCurrent, job.context);
    CALL(cuModuleLoadData, &module, PTX);
    CALL(cuModuleGetFunction, &job.fill, module, "count_up_u32");
    CALL(cuModuleGetFunction, &job.compare, module, "differs_u32");
    CALL(cuStreamCreate, &job.stream, NON_BLOCKING);
    CALL(cuMemAlloc, &job.wrong_words, BLOCKS_MAX * sizeof(uint64_t));
    return make_tensors();
}

// Makes all communicators, of a part of the channels each. Null, or what failed.
const char *replay_open(unsigned rank, unsigned ranks, unsigned communicators, unsigned parts, const char *folder) {
    if (ranks < 2 || ranks > RANKS_MAX || communicators > COMMUNICATORS_MAX || parts == 0) return "such a job is not possible";
    job.rank = rank, job.ranks = ranks, job.parts = parts, job.count = communicators;
    job.communicators = calloc(communicators, sizeof *job.communicators);
    if (job.communicators == NULL) return "no host memory";
    const char *missing = find_functions();
    if (missing != NULL) return failed("the driver has no %s", missing), job.failure;
    if (!open_folder(folder) || !open_device() || !start_service() || !barrier()) return job.failure;
    for (unsigned i = 0; i < communicators; i++) {
        struct communicator *c = &job.communicators[i];
        c->number = i, c->pair = i % pair_count();
        c->side = rank_of(c->pair, 1) == rank;
        if (is_mine(c) && !make(c)) return job.failure;
    }
    return NULL;
}

// One step, with `*value` for the words that were compared. Null, or what failed.
const char *replay_step(unsigned number, uint64_t *value) {
    const char *fault = getenv("REPLAY_FAULT");
    struct communicator *renewed = &job.communicators[number % job.count];
    job.step = number + 1;
    *value = 0;
    if (is_mine(renewed) && (!end(renewed) || !make(renewed))) return job.failure;
    if (!barrier()) return job.failure;
    for (unsigned i = 0; i < job.count; i++) {
        struct communicator *c = &job.communicators[i];
        if (is_mine(c) && i % WRITTEN_EVERY == number % WRITTEN_EVERY && !write_contents(c)) return job.failure;
    }
    int code = cuStreamSynchronize(job.stream);
    if (code != 0) return failed("rank %u, step %u: the stream failed: %d", job.rank, job.step, code), job.failure;
    if (fault != NULL && job.rank == 0 && number == 3 && !do_wrong(fault)) return job.failure;
    if (!barrier()) return job.failure;
    for (unsigned i = 0; i < job.count; i++)
        if (is_mine(&job.communicators[i]) && !verify(&job.communicators[i], value)) return job.failure;
    return verify_tensors(value) ? NULL : job.failure;
}

// Ends all communicators. Null, or what failed.
const char *replay_close(void) {
    for (unsigned i = 0; i < job.count; i++)
        if (is_mine(&job.communicators[i]) && !end(&job.communicators[i])) return job.failure;
    for (unsigned i = 0; i < TENSORS; i++)
        if (cuMemFree(job.tensors[i]) != 0) return "a tensor could not be freed";
    return NULL;
}
