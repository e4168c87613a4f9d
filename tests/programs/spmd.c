/* One rank of an ordinary job: it links NCCL as libtorch does, knows nothing of pauses, and never stops for
 * one.
 *
 *   spmd --rank R --ranks N --device D --id FILE --mode MODE --steps S [--stick-at STEP]
 *
 * It says `ok ready` when it has a first piece of memory, and `ok STEPS SUM` when it is done; then it waits for
 * the end of its input. SUM depends on every result of every step. With --stick-at the rank stops in front of
 * that step until a line comes on standard input, and says `ok stuck`.
 *
 *   data       two threads, each with a communicator and a stream of its own, reduce gradients
 *   tensor     tensor parallel pairs, data parallel pairs and the whole world, by ncclCommSplit
 *   pipeline   stages send activations on and gradients back, one forward, one backward
 *   graph      a captured graph with a collective on a stream that joined by an event
 *   churn      communicators are made, split, used and destroyed all the time
 *   suspend    the job suspends and resumes its communicator by itself, alone and in groups
 *   waiting    communicators that do not block: every call is asked about until it is over
 *   rollout    ranks 0 and 1 train, 2 and 3 generate: rank 0 waits on the host for each rollout, which is
 *              ROLLOUT collectives of theirs, and they for the end of each step of training
 *   window, given, kernels, signal, every, moved, experts, grow, shrink, regraph, abort, abort-group
 *              see spmd/others.h
 */
#include "simnccl/simnccl.h"

#include "../simcuda/programs/driver.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <unistd.h>

#define WORDS 512u
#define BYTES (WORDS * 4)
#define STREAM_NON_BLOCKING 1
#define CAPTURE_RELAXED 2

static int rank, ranks, device, steps, stick_at = -1;
static const char *id_path, *mode;
static CUcontext context;

#define NCCL(call) \
    do { \
        int result_ = (call); \
        if (result_ != ncclSuccess) { \
            printf("fail line %d: %s: %d\n", __LINE__, #call, result_); \
            fflush(stdout); \
            _exit(1); \
        } \
    } while (0)

static void say(const char *text)
{
    puts(text);
    fflush(stdout);
}

/* For others: a file that appears whole. */
static void publish_id(int number, const ncclUniqueId *id)
{
    char path[4096], fresh[4096 + 8];
    snprintf(path, sizeof path, "%s.%d", id_path, number);
    snprintf(fresh, sizeof fresh, "%s.new", path);
    FILE *file = fopen(fresh, "w");
    fwrite(id, sizeof *id, 1, file);
    fclose(file);
    rename(fresh, path);
}

/* The `number`th id that rank 0 makes for all. */
static ncclUniqueId shared_id(int number)
{
    char path[4096];
    ncclUniqueId id;
    snprintf(path, sizeof path, "%s.%d", id_path, number);
    if (rank == 0) {
        NCCL(ncclGetUniqueId(&id));
        publish_id(number, &id);
        return id;
    }
    for (int tries = 0; tries < 120000; tries++) {
        FILE *file = fopen(path, "r");
        if (file != NULL) {
            size_t got = fread(&id, sizeof id, 1, file);
            fclose(file);
            if (got == 1)
                return id;
        }
        usleep(1000);
    }
    say("fail no id came from rank 0");
    _exit(1);
}

static ncclComm_t world(int number)
{
    ncclComm_t comm = NULL;
    NCCL(ncclCommInitRank(&comm, ranks, shared_id(number), rank));
    return comm;
}

static CUdeviceptr tensor(uint32_t seed)
{
    CUdeviceptr address = 0;
    uint32_t words[WORDS];
    for (uint32_t i = 0; i < WORDS; i++)
        words[i] = (i + seed) * 2654435761u + (uint32_t)rank * 40503u;
    OK(cuMemAlloc(&address, BYTES));
    OK(cuMemcpyHtoD(address, words, BYTES));
    return address;
}

static CUstream new_stream(void)
{
    CUstream stream = NULL;
    OK(cuStreamCreate(&stream, STREAM_NON_BLOCKING));
    return stream;
}

static void all_reduce(CUdeviceptr data, ncclComm_t comm, CUstream stream)
{
    NCCL(ncclAllReduce((void *)data, (void *)data, WORDS, ncclUint32, ncclSum, comm, stream));
}

/* Some computing, which differs from rank to rank. */
static void compute(CUdeviceptr data, CUstream stream)
{
    driver_affine(data, 5, 7 + 2 * (uint32_t)rank, WORDS, stream);
}

static void maybe_stick(int step)
{
    if (step != stick_at)
        return;
    say("ok stuck");
    char line[16];
    if (read(0, line, sizeof line) <= 0)
        _exit(1);
}

static uint64_t sum_of(CUdeviceptr data, CUstream stream)
{
    return driver_sum(data, WORDS, stream);
}

typedef struct {
    int number;
    uint64_t sum;
} Half;

static void *reduce_gradients(void *argument)
{
    Half *half = argument;
    OK(cuCtxSetCurrent(context));
    ncclComm_t comm = world(half->number);
    CUstream stream = new_stream();
    CUdeviceptr data = tensor((uint32_t)half->number);
    for (int step = 0; step < steps; step++) {
        if (half->number == 0)
            maybe_stick(step);
        compute(data, stream);
        all_reduce(data, comm, stream);
        if (step % 3 == 0)
            OK(cuStreamSynchronize(stream));
    }
    half->sum = sum_of(data, stream);
    NCCL(ncclCommDestroy(comm));
    return NULL;
}

/* Both halves at the same time, each in a thread of its own. */
static uint64_t run_halves(void *(*reduce)(void *))
{
    Half halves[2] = {{0, 0}, {1, 0}};
    pthread_t second;
    pthread_create(&second, NULL, reduce, &halves[1]);
    reduce(&halves[0]);
    pthread_join(second, NULL);
    return halves[0].sum * 31 + halves[1].sum;
}

static uint64_t run_data(void)
{
    return run_halves(reduce_gradients);
}

static uint64_t run_tensor(void)
{
    ncclComm_t all = world(0), pair = NULL, stride = NULL;
    CUstream stream = new_stream(), side = new_stream();
    CUdeviceptr data = tensor(1), gradient = tensor(2);
    NCCL(ncclCommSplit(all, rank / 2, rank, &pair, NULL));
    NCCL(ncclCommSplit(all, rank % 2, rank, &stride, NULL));
    for (int step = 0; step < steps; step++) {
        maybe_stick(step);
        compute(data, stream);
        all_reduce(data, pair, stream);
        compute(data, stream);
        all_reduce(data, pair, stream);
        /* Gradients of the last step go while this one computes. */
        compute(gradient, side);
        all_reduce(gradient, stride, side);
        if (step % 4 == 3) {
            OK(cuStreamSynchronize(side));
            all_reduce(gradient, all, stream);
        }
        OK(cuStreamSynchronize(stream));
    }
    uint64_t sum = sum_of(data, stream) * 31 + sum_of(gradient, side);
    NCCL(ncclCommDestroy(pair));
    NCCL(ncclCommDestroy(stride));
    NCCL(ncclCommDestroy(all));
    return sum;
}

static void forward(CUdeviceptr data, ncclComm_t comm, CUstream stream)
{
    if (rank > 0)
        NCCL(ncclRecv((void *)data, WORDS, ncclUint32, rank - 1, comm, stream));
    compute(data, stream);
}

/* One forward, one backward: in the steady state a stage sends on and receives back in one group. */
static uint64_t run_pipeline(void)
{
    ncclComm_t comm = world(0);
    CUstream stream = new_stream();
    CUdeviceptr out = tensor(1), back = tensor(2), total = tensor(3);
    int warm = ranks - 1 - rank, batches = ranks + 2;
    for (int step = 0; step < steps; step++) {
        maybe_stick(step);
        for (int batch = 0; batch < batches + warm; batch++) {
            bool goes = batch < batches, comes = batch >= warm;
            if (goes)
                forward(out, comm, stream);
            NCCL(ncclGroupStart());
            if (goes && rank < ranks - 1)
                NCCL(ncclSend((void *)out, WORDS, ncclUint32, rank + 1, comm, stream));
            if (comes && rank < ranks - 1)
                NCCL(ncclRecv((void *)back, WORDS, ncclUint32, rank + 1, comm, stream));
            NCCL(ncclGroupEnd());
            if (!comes)
                continue;
            uint64_t count = WORDS;
            void *params[] = {&total, &total, &back, &count};
            compute(back, stream);
            driver_launch("add_u32", stream, params);
            if (rank > 0)
                NCCL(ncclSend((void *)back, WORDS, ncclUint32, rank - 1, comm, stream));
        }
        NCCL(ncclAlltoAll((void *)total, (void *)out, WORDS / (uint32_t)ranks, ncclUint32, comm, stream));
        OK(cuStreamSynchronize(stream));
    }
    uint64_t sum = sum_of(total, stream) * 31 + sum_of(out, stream);
    NCCL(ncclCommDestroy(comm));
    return sum;
}

/* As torch captures: the collective's stream joins the capture by an event and is left by another. */
static CUgraphExec captured(CUdeviceptr data, ncclComm_t comm, CUstream stream)
{
    CUstream side = new_stream();
    CUevent fork = NULL, join = NULL;
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    OK(cuEventCreate(&fork, 2));
    OK(cuEventCreate(&join, 2));
    OK(cuStreamBeginCapture(stream, CAPTURE_RELAXED));
    compute(data, stream);
    OK(cuEventRecord(fork, stream));
    OK(cuStreamWaitEvent(side, fork, 0));
    all_reduce(data, comm, side);
    OK(cuEventRecord(join, side));
    OK(cuStreamWaitEvent(stream, join, 0));
    all_reduce(data, comm, stream);
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiate(&executable, graph, 0));
    OK(cuGraphDestroy(graph));
    return executable;
}

static uint64_t run_graph(void)
{
    ncclComm_t comm = world(0);
    CUstream stream = new_stream();
    CUdeviceptr data = tensor(1);
    CUgraphExec graph = captured(data, comm, stream);
    for (int step = 0; step < steps; step++) {
        maybe_stick(step);
        OK(cuGraphLaunch(graph, stream));
        if (step % 3 == 0)
            all_reduce(data, comm, stream);
        if (step % 4 == 0)
            OK(cuStreamSynchronize(stream));
    }
    uint64_t sum = sum_of(data, stream);
    OK(cuGraphExecDestroy(graph));
    NCCL(ncclCommDestroy(comm));
    return sum;
}

static uint64_t run_churn(void)
{
    CUstream stream = new_stream();
    CUdeviceptr data = tensor(1);
    for (int step = 0; step < steps; step++) {
        ncclComm_t all = world(step), child = NULL;
        maybe_stick(step);
        compute(data, stream);
        all_reduce(data, all, stream);
        NCCL(ncclCommSplit(all, rank % 2 == 0 ? 0 : -1, rank, &child, NULL));
        if (child != NULL) {
            all_reduce(data, child, stream);
            NCCL(ncclCommDestroy(child));
        }
        NCCL(ncclCommFinalize(all));
        NCCL(ncclCommDestroy(all));
    }
    return sum_of(data, stream);
}

static void is_suspended(ncclComm_t comm, uint64_t wanted)
{
    uint64_t value = 2;
    NCCL(ncclCommMemStats(comm, ncclStatGpuMemSuspended, &value));
    ncclResult_t again = wanted ? ncclCommSuspend(comm, NCCL_SUSPEND_MEM) : ncclCommResume(comm);
    if (value != wanted || again != ncclInvalidUsage) {
        say("fail the communicator is in the wrong state");
        _exit(1);
    }
}

static uint64_t run_suspend(void)
{
    ncclComm_t comm = world(0);
    CUstream stream = new_stream();
    CUdeviceptr data = tensor(1);
    for (int step = 0; step < steps; step++) {
        bool grouped = step % 2 == 1;
        compute(data, stream);
        all_reduce(data, comm, stream);
        if (grouped)
            NCCL(ncclGroupStart());
        NCCL(ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
        if (grouped)
            NCCL(ncclGroupEnd());
        is_suspended(comm, 1);
        maybe_stick(step);
        compute(data, stream);
        if (grouped)
            NCCL(ncclGroupStart());
        NCCL(ncclCommResume(comm));
        if (grouped)
            NCCL(ncclGroupEnd());
        is_suspended(comm, 0);
    }
    uint64_t sum = sum_of(data, stream);
    NCCL(ncclCommDestroy(comm));
    return sum;
}

/* As torch does in this mode: asks until the call is over. */
static void finish(ncclComm_t comm, ncclResult_t result)
{
    while (result == ncclInProgress) {
        usleep(100);
        NCCL(ncclCommGetAsyncError(comm, &result));
    }
    NCCL(result);
}

static void reduce_and_wait(CUdeviceptr data, ncclComm_t comm, CUstream stream)
{
    NCCL(ncclGroupStart());
    all_reduce(data, comm, stream);
    finish(comm, ncclGroupEnd());
}

static uint64_t run_waiting(void)
{
    ncclConfig_t config = {.size = sizeof config, .blocking = 0};
    CUstream stream = new_stream();
    CUdeviceptr data = tensor(1);
    for (int step = 0; step < steps; step++) {
        static ncclComm_t all, child;
        maybe_stick(step);
        if (step % 5 == 0) {
            ncclResult_t result = ncclCommInitRankConfig(&all, ranks, shared_id(step), rank, &config);
            finish(all, result);
        }
        if (step % 5 == 1)
            finish(all, ncclCommSplit(all, rank % 2, rank, &child, &config));
        compute(data, stream);
        reduce_and_wait(data, all, stream);
        if (child != NULL)
            reduce_and_wait(data, child, stream);
        if (step % 5 == 4) {
            NCCL(ncclCommDestroy(child));
            NCCL(ncclCommDestroy(all));
            child = NULL;
        }
    }
    return sum_of(data, stream);
}

/* Says to other ranks that `what` has come to step `step`. */
static void tell(const char *what, int step)
{
    char path[4096];
    snprintf(path, sizeof path, "%s.%s.%d", id_path, what, step);
    FILE *file = fopen(path, "w");
    if (file == NULL || fclose(file) != 0) {
        say("fail nothing was told");
        _exit(1);
    }
}

/* Waits on the host until another rank has said so. */
static void await_word(const char *what, int step)
{
    char path[4096];
    snprintf(path, sizeof path, "%s.%s.%d", id_path, what, step);
    while (access(path, F_OK) != 0)
        usleep(1000);
}

enum { ROLLOUT = 400 };

static uint64_t run_rollout(void)
{
    ncclComm_t all = world(0), team = NULL;
    CUstream stream = new_stream();
    CUdeviceptr data = tensor(1);
    bool is_first = rank % 2 == 0;
    NCCL(ncclCommSplit(all, rank / 2, rank, &team, NULL));
    for (int step = 0; step < steps; step++) {
        if (rank >= 2) {
            if (step > 0)
                await_word("trained", step - 1);
            for (int i = 0; i < ROLLOUT; i++) {
                all_reduce(data, team, stream);
                /* The host reads a token. */
                OK(cuStreamSynchronize(stream));
            }
            if (is_first)
                tell("rollout", step);
        } else {
            if (is_first)
                await_word("rollout", step);
            all_reduce(data, team, stream);
            OK(cuStreamSynchronize(stream));
            if (is_first)
                tell("trained", step);
        }
    }
    return sum_of(data, stream);
}

#include "spmd/others.h"

static uint64_t run(void)
{
    if (strcmp(mode, "window") == 0)
        return run_window();
    if (strcmp(mode, "given") == 0 || strcmp(mode, "kernels") == 0)
        return run_given(strcmp(mode, "kernels") == 0);
    if (strcmp(mode, "signal") == 0)
        return run_signal();
    if (strcmp(mode, "experts") == 0)
        return run_experts();
    if (strcmp(mode, "grow") == 0)
        return run_grow();
    if (strcmp(mode, "moved") == 0)
        return run_moved();
    if (strcmp(mode, "every") == 0)
        return run_every();
    if (strcmp(mode, "shrink") == 0)
        return run_shrink();
    if (strcmp(mode, "regraph") == 0)
        return run_regraph();
    if (strncmp(mode, "abort", 5) == 0)
        return run_abort();
    if (strcmp(mode, "data") == 0)
        return run_data();
    if (strcmp(mode, "tensor") == 0)
        return run_tensor();
    if (strcmp(mode, "pipeline") == 0)
        return run_pipeline();
    if (strcmp(mode, "graph") == 0)
        return run_graph();
    if (strcmp(mode, "churn") == 0)
        return run_churn();
    if (strcmp(mode, "suspend") == 0)
        return run_suspend();
    if (strcmp(mode, "waiting") == 0)
        return run_waiting();
    if (strcmp(mode, "rollout") == 0)
        return run_rollout();
    say("fail unknown mode");
    _exit(1);
}

static void read_arguments(int count, char **words)
{
    for (int i = 1; i + 1 < count; i += 2) {
        const char *name = words[i], *value = words[i + 1];
        if (strcmp(name, "--rank") == 0)
            rank = atoi(value);
        else if (strcmp(name, "--ranks") == 0)
            ranks = atoi(value);
        else if (strcmp(name, "--device") == 0)
            device = atoi(value);
        else if (strcmp(name, "--id") == 0)
            id_path = value;
        else if (strcmp(name, "--mode") == 0)
            mode = value;
        else if (strcmp(name, "--steps") == 0)
            steps = atoi(value);
        else if (strcmp(name, "--stick-at") == 0)
            stick_at = atoi(value);
    }
}

int main(int count, char **words)
{
    CUdeviceptr first = 0;
    CUdevice own = 0;
    char line[16];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    read_arguments(count, words);
    driver_load();
    OK(cuInit(0));
    OK(cuDeviceGet(&own, device));
    OK(cuDevicePrimaryCtxRetain(&context, own));
    OK(cuCtxSetCurrent(context));
    OK(cuMemAlloc(&first, 2u << 20));
    say("ok ready");
    uint64_t sum = run();
    printf("ok %d %llu\n", steps, (unsigned long long)sum);
    fflush(stdout);
    while (read(0, line, sizeof line) > 0)
        continue;
    return 0;
}
