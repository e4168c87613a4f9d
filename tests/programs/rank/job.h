/* What one rank holds, and the barrier that its job meets at.
 *
 * Memory of rank r, all of it filled with patterns that anybody can compute:
 *
 *   inbox[s]   2 MiB that rank s writes to; exported to s alone, except inbox[r], opened by r's own ticket
 *   window     2 MiB that everybody reads; mapped twice here, its handle retained from the address
 *   ring       2 MiB whose descriptor travels around the ring of ranks
 *   statics    any number of 2 MiB buffers that are only kept
 *   tensor, weights, spare, shared   plain allocations; `shared` is opened by the next rank by IPC handle
 *   scratch    a plain allocation in a region whose contents may be lost
 *   held       plain allocations of regions that a test asks for
 *   words      a small plain allocation for sums and flags, which stays with the driver
 */
#ifndef SUBLET_TEST_RANK_JOB_H
#define SUBLET_TEST_RANK_JOB_H

#include "../../simcuda/programs/driver.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define RANKS_MAX 8
#define STATICS_MAX 256
#define BUFFER_BYTES (2u << 20)
#define BUFFER_WORDS (BUFFER_BYTES / 4)
#define WAIT_SECONDS 60

/* Words of the small allocation. */
enum { WORD_SUM = 0, WORD_FLAG = 64, WORD_CAPTURED = 65, WORDS_COUNT = 128 };

/* What a pattern is for; two patterns of one job never agree. */
enum Purpose {
    FOR_WINDOW = 1,
    FOR_RING,
    FOR_TENSOR,
    FOR_WEIGHTS,
    FOR_SPARE,
    FOR_SHARED,
    FOR_STATIC = 32,
    FOR_HELD = 512
};

/* A handle and where it is mapped; 0 for what there is not (any more). */
typedef struct {
    CUhandle handle;
    CUdeviceptr address;
} Buffer;

/* A file that all ranks map. Everything in it only grows, so a rank that is killed leaves no lock behind. */
typedef struct {
    _Atomic uint32_t arrivals;
    _Atomic uint32_t run_on;
    _Atomic uint64_t step_of[RANKS_MAX];
} Control;

typedef struct {
    int rank, ranks, device;
    bool plain;
    unsigned static_count;
    size_t tensor_bytes, scratch_bytes;
    const char *dir, *nccl_library;
    Control *control;
    uint32_t meetings;

    CUcontext context;
    CUstream stream, side;
    CUgraphExec graph;
    uint64_t step;

    Buffer inbox[RANKS_MAX], window, ring, statics[STATICS_MAX];
    CUdeviceptr window_again, self_inbox;
    CUdeviceptr tensor, weights, spare, shared, scratch, words;

    bool connected;
    Buffer outbox[RANKS_MAX];
    CUdeviceptr peer_window[RANKS_MAX], peer_ring[RANKS_MAX], peer_shared;
} Job;

static Job job;

/* Says why this rank cannot go on, and ends it. */
__attribute__((format(printf, 1, 2), noreturn)) static void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    printf("fail ");
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
    fflush(stdout);
    _exit(1);
}

static struct timespec seconds_from_now(int seconds)
{
    struct timespec when;
    clock_gettime(CLOCK_MONOTONIC, &when);
    when.tv_sec += seconds;
    return when;
}

/* Waits until all ranks have come here as often as this one. */
static void meet(void)
{
    _Atomic uint32_t *arrivals = &job.control->arrivals;
    uint32_t wanted = ++job.meetings * (uint32_t)job.ranks;
    struct timespec deadline = seconds_from_now(WAIT_SECONDS);
    if (atomic_fetch_add(arrivals, 1) + 1 == wanted)
        syscall(SYS_futex, arrivals, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    for (uint32_t seen = atomic_load(arrivals); seen < wanted; seen = atomic_load(arrivals)) {
        long code = syscall(SYS_futex, arrivals, FUTEX_WAIT_BITSET, seen, &deadline, NULL, FUTEX_BITSET_MATCH_ANY);
        if (code != 0 && errno == ETIMEDOUT)
            die("a peer did not come within %d s: %u of %u arrivals", WAIT_SECONDS, seen, wanted);
    }
}

static void map_control(void)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/control", job.dir);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(Control)) != 0)
        die("%s: %s", path, strerror(errno));
    job.control = mmap(NULL, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (job.control == MAP_FAILED)
        die("mapping %s: %s", path, strerror(errno));
    close(fd);
}

/* Word `index` of the memory that `rank` has for `purpose`. */
static inline uint32_t pattern(int rank, unsigned purpose, uint64_t index)
{
    uint32_t word = (uint32_t)index * 2654435761u + (uint32_t)(rank + 1) * 40503u + purpose * 2246822519u;
    return word ^ (word >> 15);
}

static void fill_with_pattern(CUdeviceptr address, size_t bytes, unsigned purpose)
{
    uint32_t *host = malloc(bytes);
    if (host == NULL)
        die("no host memory");
    for (size_t i = 0; i < bytes / 4; i++)
        host[i] = pattern(job.rank, purpose, i);
    OK(cuMemcpyHtoD(address, host, bytes));
    free(host);
}

/* Maps `handle` for this rank's device. */
static CUdeviceptr map_here(CUhandle handle, size_t bytes)
{
    CUdeviceptr address = 0;
    CUaccess access = {{1, job.device}, 3};
    OK(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    OK(cuMemMap(address, bytes, 0, handle, 0));
    OK(cuMemSetAccess(address, bytes, &access, 1));
    return address;
}

static Buffer make_buffer(unsigned purpose)
{
    CUprop prop = driver_prop();
    Buffer buffer = {0, 0};
    prop.location.id = job.device;
    OK(cuMemCreate(&buffer.handle, BUFFER_BYTES, &prop, 0));
    buffer.address = map_here(buffer.handle, BUFFER_BYTES);
    if (purpose != 0)
        fill_with_pattern(buffer.address, BUFFER_BYTES, purpose);
    return buffer;
}

static CUdeviceptr make_tensor(size_t bytes, unsigned purpose)
{
    CUdeviceptr address = 0;
    OK(cuMemAlloc(&address, bytes));
    fill_with_pattern(address, bytes, purpose);
    return address;
}

/* Memory whose contents a pause may lose, where there is somebody to tell that. */
static CUdeviceptr make_scratch(size_t bytes)
{
    int (*begin)(const char *, int) = (int (*)(const char *, int))dlsym(RTLD_DEFAULT, "sublet_region_begin");
    int (*end)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "sublet_region_end");
    CUdeviceptr address = 0;
    if (begin != NULL && begin("scratch", 1) != 0)
        die("sublet_region_begin");
    OK(cuMemAlloc(&address, bytes));
    if (end != NULL && end() != 0)
        die("sublet_region_end");
    return address;
}

static void make_shareable_memory(void)
{
    for (int from = 0; from < job.ranks; from++)
        job.inbox[from] = make_buffer(0);
    job.window = make_buffer(FOR_WINDOW);
    job.ring = make_buffer(FOR_RING);
    for (unsigned i = 0; i < job.static_count; i++)
        job.statics[i] = make_buffer(FOR_STATIC + i);
    /* As NCCL does for its windows: the handle is looked up by address, mapped once more, given back. */
    CUhandle again = 0;
    OK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)job.window.address));
    if (again != job.window.handle)
        die("the retained handle is another value than the one that was mapped");
    job.window_again = map_here(again, BUFFER_BYTES);
    OK(cuMemRelease(again));
}

static void make_memory(void)
{
    OK(cuMemAlloc(&job.words, WORDS_COUNT * 4));
    OK(cuMemsetD8(job.words, 0, WORDS_COUNT * 4));
    if (!job.plain)
        make_shareable_memory();
    job.tensor = make_tensor(job.tensor_bytes, FOR_TENSOR);
    job.weights = make_tensor(BUFFER_BYTES, FOR_WEIGHTS);
    job.spare = make_tensor(BUFFER_BYTES, FOR_SPARE);
    job.shared = make_tensor(BUFFER_BYTES, FOR_SHARED);
    job.scratch = make_scratch(job.scratch_bytes);
    OK(cuCtxSynchronize());
}

#endif
