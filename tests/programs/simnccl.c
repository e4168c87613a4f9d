/* A NCCL without GPUs: the same calls, made over the driver interface in the same spirit. Communicators
 * come to be and end by a meeting of all ranks on the host; memory is created, exported and imported; and
 * work waits on the device until the peers have launched theirs. It knows unsigned 32-bit sums of up to
 * 64 KiB. Calls between ncclGroupStart and ncclGroupEnd run at the end. What a non-blocking communicator is
 * requested goes on in a thread of its own. A suspended communicator has given its memory up and kept its
 * addresses. As in NCCL, an error within a group makes its end fail, and a communicator that was aborted or destroyed
 * must not be named any more: a call that does ends the process with a word.
 */
#include "simnccl/simnccl.h"

#include "simnccl/mailbox.h"

#include <pthread.h>
#include <stdbool.h>

#define GROUP_MAX 64

struct Communicator {
    uint64_t name;
    int rank, ranks, device;
    bool non_blocking, suspended, revoked, freed;
    CUstream last;
    CUdeviceptr table; /* of its windows */
    int windows;
    uint32_t shrinks, grows, given[RANKS_MAX], awaited[RANKS_MAX];
    _Atomic int state; /* ncclInProgress while a thread works for it */
    uint32_t meetings, splits;
    Meeting *meeting;
    Box boxes[RANKS_MAX];
    /* As NCCL has many, for each channel and peer: nothing is ever done with them. */
    int further;
    Box (*further_boxes)[RANKS_MAX];
    /* A thread that uses the boxes, where they are in host memory. */
    pthread_t proxy;
    bool has_proxy;
    _Atomic bool proxy_ends;
};

typedef enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, SEND, RECEIVE, SUSPEND, RESUME, SIGNAL, WAIT } Kind;

typedef struct {
    Kind kind;
    ncclComm_t comm;
    CUstream stream;
    CUdeviceptr from, to;
    size_t bytes;
    int peer; /* or the root */
    int round;
} Call;

typedef struct {
    int depth, count;
    ncclResult_t error;
    Call calls[GROUP_MAX];
} Group;

static __thread Group group;

/* Something that a thread does for non-blocking communicators. */
typedef struct {
    void (*work)(void *);
    void *argument;
    int device, count;
    ncclComm_t comms[GROUP_MAX];
} Job;

static void *run_job(void *argument)
{
    Job *job = argument;
    CUcontext context = NULL;
    OK(cuDevicePrimaryCtxRetain(&context, job->device));
    OK(cuCtxSetCurrent(context));
    job->work(job->argument);
    for (int i = 0; i < job->count; i++)
        atomic_store(&job->comms[i]->state, ncclSuccess);
    free(job);
    return NULL;
}

/* Does `work` now, or later when the communicator does not block. */
static ncclResult_t do_for(ncclComm_t *comms, int count, void (*work)(void *), void *argument)
{
    pthread_t thread;
    if (!comms[0]->non_blocking) {
        work(argument);
        return ncclSuccess;
    }
    Job *job = calloc(1, sizeof *job);
    *job = (Job){.work = work, .argument = argument, .device = comms[0]->device, .count = count};
    for (int i = 0; i < count; i++) {
        job->comms[i] = comms[i];
        atomic_store(&comms[i]->state, ncclInProgress);
    }
    if (pthread_create(&thread, NULL, run_job, job) != 0)
        stop("no thread");
    pthread_detach(thread);
    return ncclInProgress;
}

/* The communicator is one that may be named. */
static ncclComm_t alive(ncclComm_t comm)
{
    if (comm != NULL && comm->freed)
        stop("a communicator is named that has been aborted or destroyed");
    return comm;
}

static void load_driver(void)
{
    static _Atomic int loaded;
    if (!atomic_load(&loaded)) {
        driver_load();
        atomic_store(&loaded, 1);
    }
}

static void meet_all(ncclComm_t comm)
{
    meet(comm->meeting, comm->ranks, ++comm->meetings);
}

static ncclComm_t new_communicator(uint64_t name, int rank, int ranks, bool non_blocking)
{
    load_driver();
    ncclComm_t comm = calloc(1, sizeof *comm);
    if (comm == NULL || ranks > RANKS_MAX || rank < 0 || rank >= ranks)
        stop("rank %d of %d", rank, ranks);
    comm->name = name;
    comm->rank = rank;
    comm->ranks = ranks;
    comm->non_blocking = non_blocking;
    comm->meeting = map_meeting(name);
    OK(cuCtxGetDevice(&comm->device));
    return comm;
}

static void connect_boxes(ncclComm_t comm, int listener, Box *boxes)
{
    make_box(&boxes[comm->rank], comm->device);
    meet_all(comm);
    exchange_boxes(comm->name, listener, comm->rank, comm->ranks, comm->device, boxes);
    meet_all(comm);
}

static volatile uint32_t *proxy_word(const Box *box, int rank)
{
    return (volatile uint32_t *)(uintptr_t)(box->address + PROXY_OFFSET) + rank;
}

/* Counts in all boxes, and sees what the others count in its own, whatever the devices do. */
static void *run_proxy(void *argument)
{
    ncclComm_t comm = argument;
    uint32_t count = *proxy_word(&comm->boxes[comm->rank], comm->rank), seen[RANKS_MAX] = {0};
    while (!atomic_load(&comm->proxy_ends)) {
        count++;
        for (int peer = 0; peer < comm->ranks; peer++) {
            uint32_t theirs = *proxy_word(&comm->boxes[comm->rank], peer);
            if (theirs < seen[peer])
                stop("the count of rank %d went from %u to %u", peer, seen[peer], theirs);
            seen[peer] = theirs;
            *proxy_word(&comm->boxes[peer], comm->rank) = count;
        }
        usleep(500);
    }
    return NULL;
}

static void start_proxy(ncclComm_t comm)
{
    atomic_store(&comm->proxy_ends, false);
    comm->has_proxy = boxes_are_in_host_memory();
    if (comm->has_proxy && pthread_create(&comm->proxy, NULL, run_proxy, comm) != 0)
        stop("no thread");
}

static void end_proxy(ncclComm_t comm)
{
    atomic_store(&comm->proxy_ends, true);
    if (comm->has_proxy)
        pthread_join(comm->proxy, NULL);
    comm->has_proxy = false;
}

/* Meets the other ranks and maps their boxes. */
static void join_peers(void *argument)
{
    ncclComm_t comm = argument;
    int listener = listen_as(comm->name, comm->rank);
    connect_boxes(comm, listener, comm->boxes);
    const char *further = getenv("SIMNCCL_FURTHER_BOXES");
    if (comm->further_boxes == NULL && further != NULL) {
        comm->further = atoi(further);
        comm->further_boxes = calloc((size_t)comm->further, sizeof *comm->further_boxes);
    }
    for (int row = 0; row < comm->further; row++)
        connect_boxes(comm, listener, comm->further_boxes[row]);
    close(listener);
    unlink(socket_of(comm->name, comm->rank).sun_path);
    start_proxy(comm);
}

/* The boxes that work uses, and behind them those that it does not. */
static Box *boxes_of(ncclComm_t comm, int row)
{
    return row < 0 ? comm->boxes : comm->further_boxes[row];
}

/* What others have of this rank's memory goes before the memory itself. */
static void suspend(ncclComm_t comm)
{
    OK(cuCtxSynchronize());
    end_proxy(comm);
    meet_all(comm);
    for (int row = -1; row < comm->further; row++)
        for (int peer = 0; peer < comm->ranks; peer++)
            if (peer != comm->rank)
                suspend_box(&boxes_of(comm, row)[peer]);
    meet_all(comm);
    for (int row = -1; row < comm->further; row++)
        suspend_box(&boxes_of(comm, row)[comm->rank]);
    comm->suspended = true;
}

/* New memory at the same addresses. The boxes hold nothing between two calls. */
static void resume(ncclComm_t comm)
{
    join_peers(comm);
    comm->suspended = false;
}

ncclResult_t ncclGetVersion(int *version)
{
    *version = 22809;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    memset(id, 0, sizeof *id);
    ssize_t got = read(fd, id->internal, 32);
    close(fd);
    return got == 32 ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    uint64_t name = hashed(14695981039346656037u, id.internal, sizeof id.internal);
    *made = new_communicator(name, rank, ranks, config != NULL && config->blocking == 0);
    return do_for(made, 1, join_peers, *made);
}

ncclResult_t ncclCommInitRank(ncclComm_t *made, int ranks, ncclUniqueId id, int rank)
{
    return ncclCommInitRankConfig(made, ranks, id, rank, NULL);
}

typedef struct {
    ncclComm_t parent, *made;
    int color, key;
} Split;

static void split(void *argument)
{
    Split *split = argument;
    ncclComm_t parent = split->parent;
    Meeting *meeting = parent->meeting;
    int rank = 0, ranks = 0;
    meeting->color[parent->rank] = split->color;
    meeting->key[parent->rank] = split->key;
    meet_all(parent);
    for (int peer = 0; peer < parent->ranks; peer++) {
        if (meeting->color[peer] != split->color)
            continue;
        int other = meeting->key[peer];
        rank += other < split->key || (other == split->key && peer < parent->rank);
        ranks++;
    }
    meet_all(parent);
    uint64_t words[] = {parent->name, parent->splits++, (uint64_t)split->color};
    if (split->color >= 0) {
        uint64_t name = hashed(14695981039346656037u, words, sizeof words);
        ncclComm_t child = new_communicator(name, rank, ranks, parent->non_blocking);
        join_peers(child);
        __atomic_store_n(split->made, child, __ATOMIC_RELEASE);
    }
    free(split);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *made, ncclConfig_t *config)
{
    (void)config;
    Split *work = malloc(sizeof *work);
    alive(parent);
    *work = (Split){parent, made, color, key};
    *made = NULL;
    return do_for(&parent, 1, split, work);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    meet_all(alive(comm));
    return ncclSuccess;
}

/* Ends what the device does for the communicator: it waits for flags, which are set. */
static void abort_work(ncclComm_t comm)
{
    while (comm->last != NULL && cuStreamQuery(comm->last) != 0) {
        OK(cuMemsetD8(comm->boxes[comm->rank].address + FLAGS_OFFSET, 1, FLAGS_END - FLAGS_OFFSET));
        usleep(1000);
    }
}

/* What was a communicator is kept, to know it by. */
static ncclResult_t end(ncclComm_t comm)
{
    end_proxy(comm);
    if (comm->table != 0)
        OK(cuMemFreeAsync(comm->table, NULL));
    for (int row = -1; row < comm->further; row++)
        for (int peer = 0; peer < comm->ranks; peer++)
            end_box(&boxes_of(comm, row)[peer]);
    free(comm->further_boxes);
    munmap(comm->meeting, sizeof *comm->meeting);
    comm->freed = true;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    /* As NCCL does: its own work alone is waited for. Another thread may capture. */
    if (alive(comm)->last != NULL)
        OK(cuStreamSynchronize(comm->last));
    meet_all(comm);
    return end(comm);
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    atomic_store(&alive(comm)->meeting->aborted, 1);
    abort_work(comm);
    return end(comm);
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *count)
{
    *count = comm->ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank)
{
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state)
{
    *state = atomic_load(&comm->state);
    return ncclSuccess;
}

#include "simnccl/running.h"

static void run_reduce(Call call);
static void run_reduce_scatter(Call call);

static void run_calls(void)
{
    for (int i = 0; i < group.count; i++) {
        if (group.calls[i].kind == SUSPEND)
            suspend(group.calls[i].comm);
        if (group.calls[i].kind == RESUME)
            resume(group.calls[i].comm);
        if (group.calls[i].kind == ALL_REDUCE)
            run_sum(&group.calls[i], COLLECTIVE);
        if (group.calls[i].kind == REDUCE)
            run_reduce(group.calls[i]);
        if (group.calls[i].kind == REDUCE_SCATTER)
            run_reduce_scatter(group.calls[i]);
        if (group.calls[i].kind == SIGNAL)
            run_signal(&group.calls[i]);
        if (group.calls[i].kind == WAIT)
            run_wait(&group.calls[i]);
        if (group.calls[i].kind == BROADCAST)
            run_broadcast(&group.calls[i]);
    }
    int rounds = number_rounds();
    for (int round = 0; round < rounds; round++)
        run_messages(round);
    group.count = 0;
}

static void run_copy(void *copy)
{
    if (copy != &group) {
        group = *(Group *)copy;
        free(copy);
    }
    run_calls();
}

/* All communicators of a group block, or none. */
static ncclResult_t run_group(void)
{
    ncclComm_t comms[GROUP_MAX];
    Group *copy = &group;
    if (group.count == 0)
        return ncclSuccess;
    for (int i = 0; i < group.count; i++) {
        comms[i] = alive(group.calls[i].comm);
        if (group.calls[i].stream != NULL)
            comms[i]->last = group.calls[i].stream;
    }
    if (comms[0]->non_blocking) {
        copy = malloc(sizeof *copy);
        *copy = group;
        group.count = 0;
    }
    return do_for(comms, copy->count, run_copy, copy);
}

static ncclResult_t check_and_add(Call call, size_t count, ncclDataType_t kind)
{
    call.bytes = count * 4;
    if (alive(call.comm) == NULL || kind != ncclUint32 || call.bytes > SLOT_BYTES || group.count == GROUP_MAX)
        return ncclInvalidArgument;
    if (call.comm->revoked || call.comm->suspended != (call.kind == RESUME))
        return ncclInvalidUsage;
    if (call.peer < 0 || call.peer >= call.comm->ranks)
        return ncclInvalidArgument;
    if (atomic_load(&call.comm->state) != ncclSuccess)
        return ncclInvalidUsage;
    group.calls[group.count++] = call;
    return group.depth == 0 ? run_group() : ncclSuccess;
}

/* An error within a group is the group's. */
static ncclResult_t add(Call call, size_t count, ncclDataType_t kind)
{
    ncclResult_t result = check_and_add(call, count, kind);
    if (group.depth > 0 && result != ncclSuccess && result != ncclInProgress)
        group.error = result;
    return result;
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclRedOp_t operator,
                           ncclComm_t comm, ncclStream_t stream)
{
    Call call = {.kind = ALL_REDUCE, .comm = comm, .stream = stream, .from = (CUdeviceptr)send,
                 .to = (CUdeviceptr)receive};
    return operator == ncclSum ? add(call, count, kind) : ncclInvalidArgument;
}

ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t kind, int root,
                           ncclComm_t comm, ncclStream_t stream)
{
    Call call = {.kind = BROADCAST, .comm = comm, .stream = stream, .from = (CUdeviceptr)send,
                 .to = (CUdeviceptr)receive, .peer = root};
    return add(call, count, kind);
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t kind, int peer, ncclComm_t comm,
                      ncclStream_t stream)
{
    Call call = {.kind = SEND, .comm = comm, .stream = stream, .from = (CUdeviceptr)send, .peer = peer};
    return add(call, count, kind);
}

ncclResult_t ncclRecv(void *receive, size_t count, ncclDataType_t kind, int peer, ncclComm_t comm,
                      ncclStream_t stream)
{
    Call call = {.kind = RECEIVE, .comm = comm, .stream = stream, .to = (CUdeviceptr)receive, .peer = peer};
    return add(call, count, kind);
}

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags)
{
    return flags == NCCL_SUSPEND_MEM ? add((Call){.kind = SUSPEND, .comm = comm}, 0, ncclUint32) : ncclInvalidArgument;
}

ncclResult_t ncclCommResume(ncclComm_t comm)
{
    return add((Call){.kind = RESUME, .comm = comm}, 0, ncclUint32);
}

ncclResult_t ncclCommMemStats(ncclComm_t comm, int stat, uint64_t *value)
{
    if (comm == NULL || value == NULL || stat < ncclStatGpuMemSuspend || stat > ncclStatGpuMemTotal)
        return ncclInvalidArgument;
    uint64_t bytes = (uint64_t)comm->ranks * BOX_BYTES;
    *value = stat == ncclStatGpuMemSuspended ? comm->suspended : stat == ncclStatGpuMemPersist ? 0 : bytes;
    return ncclSuccess;
}

/* By its own public functions, which a preload object may stand in for. */
ncclResult_t ncclAlltoAll(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclComm_t comm,
                          ncclStream_t stream)
{
    ncclResult_t code = ncclGroupStart();
    for (int peer = 0; peer < comm->ranks && code == ncclSuccess; peer++) {
        code = ncclSend((const char *)send + (size_t)peer * count * 4, count, kind, peer, comm, stream);
        if (code == ncclSuccess)
            code = ncclRecv((char *)receive + (size_t)peer * count * 4, count, kind, peer, comm, stream);
    }
    ncclResult_t ended = ncclGroupEnd();
    return code != ncclSuccess ? code : ended;
}

ncclResult_t ncclGroupStart(void)
{
    group.depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (group.depth == 0)
        return ncclInvalidUsage;
    if (--group.depth > 0)
        return ncclSuccess;
    ncclResult_t error = group.error;
    group.error = ncclSuccess;
    if (error == ncclSuccess)
        return run_group();
    for (int i = 0; i < group.count; i++)
        alive(group.calls[i].comm);
    group.count = 0;
    return error;
}

ncclResult_t ncclSignal(int peer, int index, int context, unsigned flags, ncclComm_t comm, ncclStream_t stream)
{
    Call call = {.kind = SIGNAL, .comm = comm, .stream = stream, .peer = peer};
    return index == 0 && context == 0 && flags == 0 ? add(call, 0, ncclUint32) : ncclInvalidArgument;
}

/* Without data. */
ncclResult_t ncclPutSignal(const void *data, size_t count, ncclDataType_t kind, int peer, ncclWindow_t window,
                           size_t offset, int index, int context, unsigned flags, ncclComm_t comm, ncclStream_t stream)
{
    if (data != NULL || count != 0 || kind != ncclUint32 || window != NULL || offset != 0)
        return ncclInvalidArgument;
    return ncclSignal(peer, index, context, flags, comm, stream);
}

ncclResult_t ncclWaitSignal(int count, ncclWaitSignalDesc_t *descriptors, ncclComm_t comm, ncclStream_t stream)
{
    ncclResult_t result = ncclGroupStart();
    for (int i = 0; i < count && result == ncclSuccess; i++) {
        Call call = {.kind = WAIT, .comm = comm, .stream = stream, .peer = descriptors[i].peer,
                     .round = descriptors[i].opCnt};
        result = add(call, 0, ncclUint32);
    }
    ncclResult_t ended = ncclGroupEnd();
    return result != ncclSuccess ? result : ended;
}

ncclResult_t simnccl_exchange(void *data, size_t count, ncclComm_t comm, ncclStream_t stream)
{
    Call call = {.kind = ALL_REDUCE, .comm = alive(comm), .stream = stream, .from = (CUdeviceptr)data,
                 .to = (CUdeviceptr)data, .bytes = count * 4};
    comm->last = stream;
    run_sum(&call, EXCHANGE);
    return ncclSuccess;
}

#include "simnccl/windows.h"

#include "simnccl/regrouping.h"

#include "simnccl/more.h"
