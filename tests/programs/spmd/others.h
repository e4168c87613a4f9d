/* Modes other than the collectives: windows, signals, experts, and communicators that grow, shrink or are given up. */
#ifndef SUBLET_TEST_SPMD_OTHERS_H
#define SUBLET_TEST_SPMD_OTHERS_H

#include "../simnccl/simnccl_ep.h"

/* All register a window each step; rank 0 deregisters it immediately, the others at the end. */
static uint64_t run_window(void)
{
    ncclComm_t comm = world(0);
    CUstream stream = new_stream();
    CUdeviceptr data = tensor(1);
    ncclWindow_t *windows = calloc((size_t)steps, sizeof *windows);
    for (int step = 0; step < steps; step++) {
        maybe_stick(step);
        NCCL(ncclCommWindowRegister(comm, (void *)data, BYTES, &windows[step], 0));
        if (rank == 0)
            NCCL(ncclCommWindowDeregister(comm, windows[step]));
        compute(data, stream);
        all_reduce(data, comm, stream);
        if (step % 3 == 0)
            OK(cuStreamSynchronize(stream));
    }
    for (int step = 0; step < steps && rank != 0; step++)
        NCCL(ncclCommWindowDeregister(comm, windows[step]));
    uint64_t sum = sum_of(data, stream);
    NCCL(ncclCommDestroy(comm));
    return sum;
}

/* Sums in memory that NCCL gave its caller; with `for_kernels`, the communicator is also one for kernels. */
static uint64_t run_given(bool for_kernels)
{
    ncclComm_t comm = world(0);
    CUstream stream = new_stream();
    CUdeviceptr first = tensor(1);
    void *given = NULL;
    ncclDevComm_t made;
    NCCL(ncclMemAlloc(&given, BYTES));
    if (for_kernels)
        NCCL(ncclDevCommCreate(comm, NULL, &made));
    uint32_t words[WORDS];
    OK(cuMemcpyDtoH(words, first, BYTES));
    OK(cuMemcpyHtoD((CUdeviceptr)given, words, BYTES));
    for (int step = 0; step < steps; step++) {
        maybe_stick(step);
        compute((CUdeviceptr)given, stream);
        all_reduce((CUdeviceptr)given, comm, stream);
        if (step % 3 == 0)
            OK(cuStreamSynchronize(stream));
    }
    uint64_t sum = sum_of((CUdeviceptr)given, stream);
    if (for_kernels)
        NCCL(ncclDevCommDestroy(comm, &made));
    NCCL(ncclCommDestroy(comm));
    NCCL(ncclMemFree(given));
    return sum;
}

/* Each rank signals the next, and waits for what the one before has signalled, now and then for two together. The last
 * signals nobody waits for. */
static uint64_t run_signal(void)
{
    ncclComm_t comm = world(0);
    CUstream stream = new_stream();
    CUdeviceptr data = tensor(1);
    int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks, owed = 0;
    for (int step = 0; step < steps; step++) {
        maybe_stick(step);
        compute(data, stream);
        if (step % 2 == 0)
            NCCL(ncclSignal(next, 0, 0, 0, comm, stream));
        else
            NCCL(ncclPutSignal(NULL, 0, ncclUint32, next, NULL, 0, 0, 0, 0, comm, stream));
        owed++;
        if (step % 5 == rank % 5) {
            ncclWaitSignalDesc_t wait = {owed, before, 0, 0};
            NCCL(ncclWaitSignal(1, &wait, comm, stream));
            owed = 0;
        }
        if (step % 7 == 0)
            OK(cuStreamSynchronize(stream));
        if (step % 10 == 0)
            all_reduce(data, comm, stream);
    }
    uint64_t sum = sum_of(data, stream);
    NCCL(ncclCommDestroy(comm));
    return sum;
}

/* Every collective there is, each in both forms, over a communicator of one process and one of all. */
static uint64_t run_every(void)
{
    ncclUniqueId id = shared_id(0);
    ncclComm_t comm = NULL, alone = NULL;
    CUstream stream = new_stream();
    CUdeviceptr data = tensor(1), other = tensor(2);
    int device = 0;
    OK(cuCtxGetDevice(&device));
    NCCL(ncclCommInitRankScalable(&comm, ranks, rank, 1, &id, NULL));
    NCCL(ncclCommInitAll(&alone, 1, &device));
    size_t part = WORDS / (size_t)ranks;
    void *from = (void *)data, *to = (void *)other;
    for (int step = 0; step < steps; step++) {
        maybe_stick(step);
        int root = step % ranks;
        compute(data, stream);
        NCCL(ncclReduce(from, to, WORDS, ncclUint32, ncclSum, root, comm, stream));
        NCCL(ncclBcast(to, WORDS, ncclUint32, root, comm, stream));
        NCCL(ncclAllGather(to, from, part, ncclUint32, comm, stream));
        NCCL(ncclReduceScatter(from, to, part, ncclUint32, ncclSum, comm, stream));
        NCCL(ncclGather(to, from, part, ncclUint32, root, comm, stream));
        compute(data, stream);
        NCCL(ncclScatter(from, to, part, ncclUint32, root, comm, stream));
        compute(other, stream);
        NCCL(ncclReduceConfig(to, from, WORDS, ncclUint32, ncclSum, root, comm, stream, NULL));
        NCCL(ncclBroadcastConfig(from, from, WORDS, ncclUint32, root, comm, stream, NULL));
        NCCL(ncclAllGatherConfig(from, to, part, ncclUint32, comm, stream, NULL));
        NCCL(ncclReduceScatterConfig(to, from, part, ncclUint32, ncclSum, comm, stream, NULL));
        NCCL(ncclGatherConfig(from, to, part, ncclUint32, root, comm, stream, NULL));
        NCCL(ncclScatterConfig(to, from, part, ncclUint32, root, comm, stream, NULL));
        NCCL(ncclAlltoAllConfig(from, to, part, ncclUint32, comm, stream, NULL));
        NCCL(ncclAllReduceConfig(to, from, WORDS, ncclUint32, ncclSum, comm, stream, NULL));
        all_reduce(data, alone, stream);
        NCCL(ncclGroupStart());
        all_reduce(data, comm, stream);
        NCCL(ncclGroupSimulateEnd(NULL));
        if (step % 3 == 0)
            OK(cuStreamSynchronize(stream));
    }
    uint64_t sum = sum_of(data, stream) + sum_of(other, stream);
    NCCL(ncclCommDestroy(alone));
    NCCL(ncclCommDestroy(comm));
    return sum;
}

static void *of_driver(const char *name)
{
    void *found = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
    if (found == NULL)
        say("fail the driver lacks a function");
    return found;
}

/* A graph with a collective is moved into another, and one more is captured into it there. */
static uint64_t run_moved(void)
{
    struct {
        int kind, reserved[3];
        CUgraph child;
        int ownership;
        char rest[256];
    } params = {.kind = 4, .ownership = 1};
    CUresult (*create)(CUgraph *, unsigned) = of_driver("cuGraphCreate");
    CUresult (*add)(void **, CUgraph, const void *, const void *, size_t, void *) = of_driver("cuGraphAddNode_v2");
    CUresult (*begin)(CUstream, CUgraph, const void *, const void *, size_t, int) =
        of_driver("cuStreamBeginCaptureToGraph");
    ncclComm_t comm = world(0);
    CUstream stream = new_stream();
    CUdeviceptr data = tensor(1);
    CUgraph parent = NULL;
    CUgraphExec executable = NULL;
    void *node = NULL;
    OK(cuStreamBeginCapture(stream, CAPTURE_RELAXED));
    all_reduce(data, comm, stream);
    OK(cuStreamEndCapture(stream, &params.child));
    OK(create(&parent, 0));
    OK(add(&node, parent, NULL, NULL, 0, &params));
    OK(begin(stream, params.child, NULL, NULL, 0, CAPTURE_RELAXED));
    compute(data, stream);
    all_reduce(data, comm, stream);
    OK(cuStreamEndCapture(stream, &params.child));
    OK(cuGraphInstantiate(&executable, parent, 0));
    for (int step = 0; step < steps; step++)
        OK(cuGraphLaunch(executable, stream));
    uint64_t sum = sum_of(data, stream);
    OK(cuGraphExecDestroy(executable));
    OK(cuGraphDestroy(parent));
    NCCL(ncclCommDestroy(comm));
    return sum;
}

/* Exchanges between experts, also in a graph. Ranks make different numbers of handles. */
static uint64_t run_experts(void)
{
    ncclComm_t comm = world(0);
    CUstream stream = new_stream();
    CUdeviceptr data = tensor(1), workspace = tensor(2);
    ncclEpGroupConfig_t config = {(void *)workspace, stream};
    ncclEpGroup_t group = NULL;
    ncclEpHandle_t handle = NULL, extra = NULL;
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    NCCL(ncclEpCreateGroup(&group, comm, &config));
    NCCL(ncclEpCreateHandle(&handle, group, 1, NULL, NULL, NULL, stream));
    OK(cuStreamBeginCapture(stream, CAPTURE_RELAXED));
    compute(data, stream);
    NCCL(ncclEpDispatch(handle, (void *)data, NULL, NULL, NULL, stream));
    NCCL(ncclEpCombine(handle, (void *)data, NULL, NULL, stream));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiate(&executable, graph, 0));
    for (int step = 0; step < steps; step++) {
        maybe_stick(step);
        if (step % (rank + 2) == 0) {
            NCCL(ncclEpInitHandle(&extra, group, 1, NULL, 2, NULL));
            NCCL(ncclEpHandleDestroy(extra));
        }
        NCCL(ncclEpUpdateHandle(handle, NULL, NULL, stream));
        NCCL(ncclEpDispatch(handle, (void *)data, NULL, NULL, NULL, stream));
        compute(data, stream);
        NCCL(ncclEpCombine(handle, (void *)data, NULL, NULL, stream));
        if (step % 3 == 0)
            OK(cuGraphLaunch(executable, stream));
        if (step % 4 == 0)
            OK(cuStreamSynchronize(stream));
    }
    uint64_t sum = sum_of(data, stream);
    NCCL(ncclEpHandleDestroy(handle));
    NCCL(ncclEpGroupDestroy(group));
    OK(cuGraphExecDestroy(executable));
    OK(cuGraphDestroy(graph));
    NCCL(ncclCommDestroy(comm));
    return sum;
}

/* The id by which the last rank joins the others, made by rank 0 for the `number`th growing. */
static ncclUniqueId growing_id(int number, ncclComm_t parent)
{
    ncclUniqueId id;
    if (rank != 0)
        return shared_id(number);
    NCCL(ncclCommGetUniqueId(parent, &id));
    publish_id(number, &id);
    return id;
}

/* All ranks but the last have a communicator, which grows by the last one again and again. */
static uint64_t run_grow(void)
{
    ncclComm_t parent = NULL;
    CUstream stream = new_stream();
    CUdeviceptr data = tensor(1);
    bool is_new = rank == ranks - 1;
    if (!is_new)
        NCCL(ncclCommInitRank(&parent, ranks - 1, shared_id(0), rank));
    for (int step = 0; step < steps; step++) {
        ncclComm_t grown = NULL;
        ncclUniqueId id;
        if (!is_new)
            all_reduce(data, parent, stream);
        if (rank == 0 || is_new)
            id = growing_id(1 + step, parent);
        NCCL(ncclCommGrow(parent, ranks, rank == 0 || is_new ? &id : NULL, is_new ? rank : -1, &grown, NULL));
        maybe_stick(step);
        for (int i = 0; i < 8; i++) {
            compute(data, stream);
            all_reduce(data, grown, stream);
        }
        NCCL(ncclCommDestroy(grown));
    }
    uint64_t sum = sum_of(data, stream);
    if (!is_new)
        NCCL(ncclCommDestroy(parent));
    return sum;
}

/* Rank 0 has launched one collective more than the others when the last rank is lost to the job: what is under way is
 * aborted, and the others go on by themselves. Then they revoke what they have, and split it. */
static uint64_t run_shrink(void)
{
    ncclComm_t parent = world(0), child = NULL, half = NULL;
    CUstream stream = new_stream(), rest = new_stream();
    CUdeviceptr data = tensor(1), lost = tensor(2);
    int excluded[] = {ranks - 1};
    for (int step = 0; step < 5; step++)
        all_reduce(lost, parent, stream);
    OK(cuStreamSynchronize(stream));
    if (rank == ranks - 1)
        return 0;
    if (rank == 0)
        all_reduce(lost, parent, stream);
    NCCL(ncclCommShrink(parent, excluded, 1, &child, NULL, NCCL_SHRINK_ABORT));
    for (int step = 0; step < steps; step++) {
        maybe_stick(step);
        compute(data, rest);
        all_reduce(data, child, rest);
        if (step % 3 == 0)
            OK(cuStreamSynchronize(rest));
    }
    OK(cuStreamSynchronize(rest));
    NCCL(ncclCommRevoke(child, 0));
    if (ncclAllReduce((void *)data, (void *)data, WORDS, ncclUint32, ncclSum, child, rest) != ncclInvalidUsage) {
        say("fail a revoked communicator was used");
        _exit(1);
    }
    NCCL(ncclCommSplit(child, 0, rank, &half, NULL));
    all_reduce(data, half, rest);
    return sum_of(data, rest);
}

/* Makes a graph with collectives, launches it a few times, and ends it, again and again. */
static void *reduce_by_graphs(void *argument)
{
    Half *half = argument;
    OK(cuCtxSetCurrent(context));
    ncclComm_t comm = world(half->number);
    CUstream stream = new_stream();
    CUdeviceptr data = tensor((uint32_t)half->number);
    for (int step = 0; step < steps; step++) {
        CUgraphExec graph = captured(data, comm, stream);
        for (int i = 0; i < 3; i++)
            OK(cuGraphLaunch(graph, stream));
        OK(cuStreamSynchronize(stream));
        OK(cuGraphExecDestroy(graph));
    }
    half->sum = sum_of(data, stream);
    NCCL(ncclCommDestroy(comm));
    return NULL;
}

/* Two threads, which get each other's values for graphs and executables as these end. */
static uint64_t run_regraph(void)
{
    return run_halves(reduce_by_graphs);
}

typedef struct {
    ncclComm_t comm;
    bool grouped;
    ncclResult_t result;
    _Atomic int launched;
} Worker;

/* Reduces until it is told that this cannot be. */
static void *reduce_until_refused(void *argument)
{
    Worker *worker = argument;
    OK(cuCtxSetCurrent(context));
    CUstream stream = new_stream();
    CUdeviceptr data = tensor(1);
    void *at = (void *)data;
    while (worker->result == ncclSuccess) {
        if (worker->grouped) {
            NCCL(ncclGroupStart());
            NCCL(ncclAllReduce(at, at, WORDS, ncclUint32, ncclSum, worker->comm, stream));
            worker->result = ncclGroupEnd();
        } else {
            worker->result = ncclAllReduce(at, at, WORDS, ncclUint32, ncclSum, worker->comm, stream);
        }
        worker->launched++;
    }
    /* The thread is as good as before: its next group is a new one. */
    NCCL(ncclGroupStart());
    NCCL(ncclGroupEnd());
    return NULL;
}

/* A thread works; the main thread aborts its communicator when a line comes, and says what the worker was told. */
static uint64_t run_abort(void)
{
    Worker worker = {.comm = world(0), .grouped = strcmp(mode, "abort-group") == 0};
    pthread_t thread;
    char line[16];
    pthread_create(&thread, NULL, reduce_until_refused, &worker);
    while (worker.launched < 10)
        usleep(1000);
    say("ok working");
    if (read(0, line, sizeof line) <= 0)
        _exit(1);
    NCCL(ncclCommAbort(worker.comm));
    pthread_join(thread, NULL);
    printf("ok refused %d\n", worker.result);
    fflush(stdout);
    return 0;
}

#endif
