/* Collectives that are made of others, and further ways to a communicator. At the end of simnccl.c. */
#ifndef SUBLET_TEST_SIMNCCL_MORE_H
#define SUBLET_TEST_SIMNCCL_MORE_H

/* A sum that this rank alone, or none of its callers, wants. One at a time: collectives of a communicator have an order. */
static CUdeviceptr scratch_of(ncclComm_t comm)
{
    return comm->boxes[comm->rank].address + SCRATCH_OFFSET;
}

static void run_reduce(Call call)
{
    if (call.comm->rank != call.peer)
        call.to = scratch_of(call.comm);
    run_sum(&call, COLLECTIVE);
}

/* `bytes` are those of all ranks. */
static void run_reduce_scatter(Call call)
{
    CUdeviceptr own = call.to;
    size_t part = call.bytes / (size_t)call.comm->ranks;
    call.to = scratch_of(call.comm);
    run_sum(&call, COLLECTIVE);
    OK(cuMemcpyDtoDAsync(own, call.to + part * (size_t)call.comm->rank, part, call.stream));
}

ncclResult_t ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclRedOp_t operator, int root,
                        ncclComm_t comm, ncclStream_t stream)
{
    Call call = {.kind = REDUCE, .comm = comm, .stream = stream, .from = (CUdeviceptr)send,
                 .to = (CUdeviceptr)receive, .peer = root};
    return operator == ncclSum ? add(call, count, kind) : ncclInvalidArgument;
}

ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclRedOp_t operator,
                               ncclComm_t comm, ncclStream_t stream)
{
    Call call = {.kind = REDUCE_SCATTER, .comm = comm, .stream = stream, .from = (CUdeviceptr)send,
                 .to = (CUdeviceptr)receive};
    return operator == ncclSum ? add(call, count * (size_t)alive(comm)->ranks, kind) : ncclInvalidArgument;
}

ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t kind, int root, ncclComm_t comm, ncclStream_t stream)
{
    Call call = {.kind = BROADCAST, .comm = comm, .stream = stream, .from = (CUdeviceptr)buffer,
                 .to = (CUdeviceptr)buffer, .peer = root};
    return add(call, count, kind);
}

/* Messages between all pairs of which `sends` and `receives` say that they have one, as one group. */
static ncclResult_t messages(const void *send, size_t send_step, int to, void *receive, size_t receive_step, int from,
                             size_t count, ncclDataType_t kind, ncclComm_t comm, ncclStream_t stream)
{
    ncclResult_t code = ncclSuccess;
    group.depth++;
    for (int peer = 0; peer < alive(comm)->ranks && code == ncclSuccess; peer++) {
        Call out = {.kind = SEND, .comm = comm, .stream = stream, .peer = peer,
                    .from = (CUdeviceptr)send + (size_t)peer * send_step};
        Call in = {.kind = RECEIVE, .comm = comm, .stream = stream, .peer = peer,
                   .to = (CUdeviceptr)receive + (size_t)peer * receive_step};
        if (to < 0 || to == peer)
            code = add(out, count, kind);
        if (code == ncclSuccess && (from < 0 || from == peer))
            code = add(in, count, kind);
    }
    group.depth--;
    if (group.depth > 0 || code != ncclSuccess)
        return code;
    return run_group();
}

enum { EVERY = -1, NOBODY = 1000 };

ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclComm_t comm,
                           ncclStream_t stream)
{
    return messages(send, 0, EVERY, receive, count * 4, EVERY, count, kind, comm, stream);
}

ncclResult_t ncclGather(const void *send, void *receive, size_t count, ncclDataType_t kind, int root, ncclComm_t comm,
                        ncclStream_t stream)
{
    int from = alive(comm)->rank == root ? EVERY : NOBODY;
    return messages(send, 0, root, receive, count * 4, from, count, kind, comm, stream);
}

ncclResult_t ncclScatter(const void *send, void *receive, size_t count, ncclDataType_t kind, int root, ncclComm_t comm,
                         ncclStream_t stream)
{
    int to = alive(comm)->rank == root ? EVERY : NOBODY;
    return messages(send, count * 4, to, receive, 0, root, count, kind, comm, stream);
}

/* The forms with settings of the call's own (NCCL 2.31), which change nothing here. */
#define WITH_CONFIG(name, parameters, ...) \
    ncclResult_t name##Config parameters \
    { \
        (void)config; \
        return name(__VA_ARGS__); \
    }
#define LAST ncclComm_t comm, ncclStream_t stream, const void *config
WITH_CONFIG(ncclAllReduce, (const void *send, void *receive, size_t count, ncclDataType_t kind, ncclRedOp_t op, LAST),
            send, receive, count, kind, op, comm, stream)
WITH_CONFIG(ncclAllGather, (const void *send, void *receive, size_t count, ncclDataType_t kind, LAST), send, receive,
            count, kind, comm, stream)
WITH_CONFIG(ncclAlltoAll, (const void *send, void *receive, size_t count, ncclDataType_t kind, LAST), send, receive,
            count, kind, comm, stream)
WITH_CONFIG(ncclBroadcast, (const void *send, void *receive, size_t count, ncclDataType_t kind, int root, LAST), send,
            receive, count, kind, root, comm, stream)
WITH_CONFIG(ncclGather, (const void *send, void *receive, size_t count, ncclDataType_t kind, int root, LAST), send,
            receive, count, kind, root, comm, stream)
WITH_CONFIG(ncclScatter, (const void *send, void *receive, size_t count, ncclDataType_t kind, int root, LAST), send,
            receive, count, kind, root, comm, stream)
WITH_CONFIG(ncclReduce,
            (const void *send, void *receive, size_t count, ncclDataType_t kind, ncclRedOp_t op, int root, LAST), send,
            receive, count, kind, op, root, comm, stream)
WITH_CONFIG(ncclReduceScatter,
            (const void *send, void *receive, size_t count, ncclDataType_t kind, ncclRedOp_t op, LAST), send, receive,
            count, kind, op, comm, stream)

/* Of a job that has one id for some of its ranks each: here, the first says it all. */
ncclResult_t ncclCommInitRankScalable(ncclComm_t *made, int ranks, int rank, int id_count, ncclUniqueId *ids,
                                      ncclConfig_t *config)
{
    uint64_t name = hashed(14695981039346656037u, ids, (size_t)id_count * sizeof *ids);
    if (id_count < 1 || id_count > ranks)
        return ncclInvalidArgument;
    *made = new_communicator(name, rank, ranks, config != NULL && config->blocking == 0);
    return do_for(made, 1, join_peers, *made);
}

typedef struct {
    ncclComm_t *made;
    uint64_t name;
    int rank, ranks, device;
} OneOfAll;

static void *join_as_one_of_all(void *argument)
{
    OneOfAll *one = argument;
    CUcontext context = NULL;
    OK(cuDevicePrimaryCtxRetain(&context, one->device));
    OK(cuCtxSetCurrent(context));
    *one->made = new_communicator(one->name, one->rank, one->ranks, false);
    join_peers(*one->made);
    return NULL;
}

/* All ranks are this process's. */
ncclResult_t ncclCommInitAll(ncclComm_t *made, int ranks, const int *devices)
{
    pthread_t threads[RANKS_MAX];
    OneOfAll all[RANKS_MAX];
    ncclUniqueId id;
    load_driver();
    if (ranks < 1 || ranks > RANKS_MAX || ncclGetUniqueId(&id) != ncclSuccess)
        return ncclInvalidArgument;
    uint64_t name = hashed(14695981039346656037u, id.internal, sizeof id.internal);
    for (int rank = 0; rank < ranks; rank++) {
        all[rank] = (OneOfAll){&made[rank], name, rank, ranks, devices == NULL ? rank : devices[rank]};
        if (pthread_create(&threads[rank], NULL, join_as_one_of_all, &all[rank]) != 0)
            stop("no thread");
    }
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
    return ncclSuccess;
}

/* Ends a group, of which nothing is done. */
ncclResult_t ncclGroupSimulateEnd(void *info)
{
    (void)info;
    if (group.depth == 0)
        return ncclInvalidUsage;
    if (--group.depth == 0) {
        group.count = 0;
        group.error = ncclSuccess;
    }
    return ncclSuccess;
}

#endif
