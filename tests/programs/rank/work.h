/* What a job computes: after step k every word of every allocation has a value that anybody can compute.
 *
 *   tensor[i] = tensor[i] * 5 + 7 + 2 * rank          by a graph that was captured once
 *   inbox[s] of rank r = tensor + weights of s         written by s through its mapping of r's memory
 *   window = sum of all inboxes                        written through one mapping, read through another
 */
#ifndef SUBLET_TEST_RANK_WORK_H
#define SUBLET_TEST_RANK_WORK_H

#include "share.h"

#define TENSOR_MUL 5u
#define TENSOR_ADD(rank) (7u + 2u * (uint32_t)(rank))

static uint64_t verified_bytes;

static void launch_add(CUdeviceptr target, CUdeviceptr a, CUdeviceptr b)
{
    uint64_t count = BUFFER_WORDS;
    void *params[] = {&target, &a, &b, &count};
    driver_launch("add_u32", job.stream, params);
}

static uint64_t sum_of(CUdeviceptr data, uint64_t count)
{
    CUdeviceptr out = job.words + 4 * WORD_SUM;
    uint64_t sum = 0;
    void *params[] = {&out, &data, &count};
    driver_launch("sum_u32", job.stream, params);
    OK(cuMemcpyDtoHAsync(&sum, out, sizeof sum, job.stream));
    OK(cuStreamSynchronize(job.stream));
    return sum;
}

static void capture_graph(void)
{
    CUgraph graph = NULL;
    OK(cuStreamBeginCapture(job.stream, 2));
    driver_affine(job.tensor, TENSOR_MUL, TENSOR_ADD(job.rank), BUFFER_WORDS, job.stream);
    OK(cuStreamEndCapture(job.stream, &graph));
    OK(cuGraphInstantiate(&job.graph, graph, 0));
    OK(cuGraphDestroy(graph));
}

/* The memory whose contents may be lost must be usable all the same. A pause between the two launches loses them: then again. */
static void use_scratch(void)
{
    uint32_t value = (uint32_t)job.step + 1;
    for (int tries = 0; tries < 4; tries++) {
        driver_fill(job.scratch, value, BUFFER_WORDS, job.stream);
        if (sum_of(job.scratch, BUFFER_WORDS) == (uint64_t)value * BUFFER_WORDS)
            return;
    }
    die("scratch memory did not keep %u within a step", value);
}

static uint64_t exchange(void)
{
    meet(); /* Everybody has read what the last step left. */
    for (int to = 0; to < job.ranks; to++)
        launch_add(to == job.rank ? job.self_inbox : job.outbox[to].address, job.tensor, job.weights);
    OK(cuStreamSynchronize(job.stream));
    meet(); /* Every inbox is full. */
    driver_fill(job.window.address, 0, BUFFER_WORDS, job.stream);
    CUdeviceptr target = job.window_again != 0 ? job.window_again : job.window.address;
    for (int from = 0; from < job.ranks; from++)
        launch_add(target, job.window.address, job.inbox[from].address);
    OK(cuStreamSynchronize(job.stream));
    meet(); /* Every window is complete. */
    uint64_t sum = sum_of(job.window.address, BUFFER_WORDS);
    for (int peer = 0; peer < job.ranks; peer++)
        if (peer != job.rank && sum_of(job.peer_window[peer], BUFFER_WORDS) != sum)
            die("the window of rank %d differs from that of rank %d", peer, job.rank);
    return sum;
}

/* Does one step and returns the sum over the window, the same on every rank. */
static uint64_t step(void)
{
    OK(cuGraphLaunch(job.graph, job.stream));
    OK(cuStreamSynchronize(job.stream));
    use_scratch();
    uint64_t sum = job.connected ? exchange() : sum_of(job.tensor, BUFFER_WORDS);
    job.step++;
    atomic_store(&job.control->step_of[job.rank], job.step);
    return sum;
}

/* Word `i` of the tensor of `rank` is its pattern * mul + add now. */
typedef struct {
    uint32_t mul, add;
} Affine;

static Affine tensor_now(int rank)
{
    Affine now = {1, 0};
    for (uint64_t k = 0; k < job.step; k++) {
        now.mul *= TENSOR_MUL;
        now.add = now.add * TENSOR_MUL + TENSOR_ADD(rank);
    }
    return now;
}

static uint32_t inbox_word(int from, Affine now, uint64_t i)
{
    return pattern(from, FOR_TENSOR, i) * now.mul + now.add + pattern(from, FOR_WEIGHTS, i);
}

/* What rank `from` wrote into every inbox that it has, in the last step. */
static void expect_inbox(uint32_t *wanted, int from)
{
    Affine now = tensor_now(from);
    for (uint64_t i = 0; i < BUFFER_WORDS; i++)
        wanted[i] = inbox_word(from, now, i);
}

static void expect_window(uint32_t *wanted)
{
    memset(wanted, 0, BUFFER_BYTES);
    for (int from = 0; from < job.ranks; from++) {
        Affine now = tensor_now(from);
        for (uint64_t i = 0; i < BUFFER_WORDS; i++)
            wanted[i] += inbox_word(from, now, i);
    }
}

static void expect_pattern(uint32_t *wanted, size_t words, int rank, unsigned purpose)
{
    for (size_t i = 0; i < words; i++)
        wanted[i] = pattern(rank, purpose, i);
}

static void expect_tensor(uint32_t *wanted)
{
    Affine now = tensor_now(job.rank);
    expect_pattern(wanted, job.tensor_bytes / 4, job.rank, FOR_TENSOR);
    for (uint64_t i = 0; i < BUFFER_WORDS; i++)
        wanted[i] = wanted[i] * now.mul + now.add;
}

/* Reads `bytes` at `address` and compares them; memory that is gone is skipped. */
static void check(const char *name, int index, CUdeviceptr address, const uint32_t *wanted, size_t bytes)
{
    if (address == 0)
        return;
    uint32_t *found = malloc(bytes);
    if (found == NULL)
        die("no host memory");
    OK(cuMemcpyDtoH(found, address, bytes));
    for (size_t i = 0; i < bytes / 4; i++)
        if (found[i] != wanted[i])
            die("%s[%d] word %zu is %08x and should be %08x after step %llu", name, index, i, found[i], wanted[i],
                (unsigned long long)job.step);
    free(found);
    verified_bytes += bytes;
}

static void check_pattern(const char *name, int index, CUdeviceptr address, int rank, unsigned purpose)
{
    static uint32_t wanted[BUFFER_WORDS];
    expect_pattern(wanted, BUFFER_WORDS, rank, purpose);
    check(name, index, address, wanted, BUFFER_BYTES);
}

static void check_shared(void)
{
    static uint32_t wanted[BUFFER_WORDS];
    expect_inbox(wanted, job.rank);
    for (int peer = 0; peer < job.ranks; peer++)
        check("outbox", peer, job.outbox[peer].address, wanted, BUFFER_BYTES);
    check("self_inbox", job.rank, job.self_inbox, wanted, BUFFER_BYTES);
    for (int from = 0; from < job.ranks; from++) {
        expect_inbox(wanted, from);
        check("inbox", from, job.inbox[from].address, wanted, BUFFER_BYTES);
    }
    expect_window(wanted);
    check("window", job.rank, job.window.address, wanted, BUFFER_BYTES);
    check("window mapped again", job.rank, job.window_again, wanted, BUFFER_BYTES);
    for (int peer = 0; peer < job.ranks; peer++)
        check("peer window", peer, job.peer_window[peer], wanted, BUFFER_BYTES);
}

/* Compares every word that this rank can reach and whose contents are kept. */
static void verify(void)
{
    verified_bytes = 0;
    uint32_t *wanted = malloc(job.tensor_bytes);
    if (wanted == NULL)
        die("no host memory");
    expect_tensor(wanted);
    check("tensor", job.rank, job.tensor, wanted, job.tensor_bytes);
    free(wanted);
    check_pattern("weights", job.rank, job.weights, job.rank, FOR_WEIGHTS);
    check_pattern("spare", job.rank, job.spare, job.rank, FOR_SPARE);
    check_pattern("shared", job.rank, job.shared, job.rank, FOR_SHARED);
    check_pattern("ring", job.rank, job.ring.address, job.rank, FOR_RING);
    for (unsigned i = 0; i < job.static_count; i++)
        check_pattern("static", (int)i, job.statics[i].address, job.rank, FOR_STATIC + i);
    for (int peer = 0; peer < job.ranks; peer++)
        check_pattern("peer ring", peer, job.peer_ring[peer], peer, FOR_RING);
    check_pattern("peer shared", job.rank, job.peer_shared, (job.rank + 1) % job.ranks, FOR_SHARED);
    if (job.connected && job.step > 0)
        check_shared();
}

#endif
