/* The part of NCCL's public interface that the simulated NCCL has, declared from its documentation. */
#ifndef SUBLET_TEST_SIMNCCL_H
#define SUBLET_TEST_SIMNCCL_H

#include <stddef.h>
#include <stdint.h>

typedef struct Communicator *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
typedef int ncclResult_t, ncclDataType_t, ncclRedOp_t;
typedef void *ncclStream_t; /* cudaStream_t */

enum { ncclSuccess = 0, ncclSystemError = 2, ncclInvalidArgument = 4, ncclInvalidUsage = 5, ncclInProgress = 7 };

/* The start of ncclConfig_t. */
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking;
} ncclConfig_t;

enum { ncclUint32 = 3 };
enum { NCCL_SUSPEND_MEM = 1 };
enum { NCCL_SHRINK_ABORT = 1 };
enum { ncclStatGpuMemSuspend, ncclStatGpuMemSuspended, ncclStatGpuMemPersist, ncclStatGpuMemTotal };
enum { ncclSum = 0 };

typedef struct Window *ncclWindow_t;
typedef struct {
    int opCnt, peer, sigIdx, ctx;
} ncclWaitSignalDesc_t;

ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRank(ncclComm_t *made, int ranks, ncclUniqueId id, int rank);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config);
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *made, ncclConfig_t *config);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags);
ncclResult_t ncclCommResume(ncclComm_t comm);
ncclResult_t ncclCommMemStats(ncclComm_t comm, int stat, uint64_t *value);
ncclResult_t ncclCommCount(ncclComm_t comm, int *count);
ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state);
ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclRedOp_t operator,
                           ncclComm_t comm, ncclStream_t stream);
ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t kind, int root,
                           ncclComm_t comm, ncclStream_t stream);
ncclResult_t ncclAlltoAll(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclComm_t comm,
                          ncclStream_t stream);
ncclResult_t ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclRedOp_t operator, int root,
                        ncclComm_t comm, ncclStream_t stream);
ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclRedOp_t operator,
                               ncclComm_t comm, ncclStream_t stream);
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t kind, int root, ncclComm_t comm, ncclStream_t stream);
ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclComm_t comm,
                           ncclStream_t stream);
ncclResult_t ncclGather(const void *send, void *receive, size_t count, ncclDataType_t kind, int root, ncclComm_t comm,
                        ncclStream_t stream);
ncclResult_t ncclScatter(const void *send, void *receive, size_t count, ncclDataType_t kind, int root, ncclComm_t comm,
                         ncclStream_t stream);
/* With settings of the call's own. */
ncclResult_t ncclAllReduceConfig(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclRedOp_t operator,
                                 ncclComm_t comm, ncclStream_t stream, const void *config);
ncclResult_t ncclAllGatherConfig(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclComm_t comm,
                                 ncclStream_t stream, const void *config);
ncclResult_t ncclAlltoAllConfig(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclComm_t comm,
                                ncclStream_t stream, const void *config);
ncclResult_t ncclBroadcastConfig(const void *send, void *receive, size_t count, ncclDataType_t kind, int root,
                                 ncclComm_t comm, ncclStream_t stream, const void *config);
ncclResult_t ncclGatherConfig(const void *send, void *receive, size_t count, ncclDataType_t kind, int root,
                              ncclComm_t comm, ncclStream_t stream, const void *config);
ncclResult_t ncclScatterConfig(const void *send, void *receive, size_t count, ncclDataType_t kind, int root,
                               ncclComm_t comm, ncclStream_t stream, const void *config);
ncclResult_t ncclReduceConfig(const void *send, void *receive, size_t count, ncclDataType_t kind, ncclRedOp_t operator,
                              int root, ncclComm_t comm, ncclStream_t stream, const void *config);
ncclResult_t ncclReduceScatterConfig(const void *send, void *receive, size_t count, ncclDataType_t kind,
                                     ncclRedOp_t operator, ncclComm_t comm, ncclStream_t stream, const void *config);
ncclResult_t ncclCommInitRankScalable(ncclComm_t *made, int ranks, int rank, int id_count, ncclUniqueId *ids,
                                      ncclConfig_t *config);
ncclResult_t ncclCommInitAll(ncclComm_t *made, int ranks, const int *devices);
ncclResult_t ncclGroupSimulateEnd(void *info);
ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t kind, int peer, ncclComm_t comm,
                      ncclStream_t stream);
ncclResult_t ncclRecv(void *receive, size_t count, ncclDataType_t kind, int peer, ncclComm_t comm,
                      ncclStream_t stream);
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags);
ncclResult_t ncclCommShrink(ncclComm_t parent, int *excluded, int excluded_count, ncclComm_t *made,
                            ncclConfig_t *config, int flags);
ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *id);
ncclResult_t ncclCommGrow(ncclComm_t parent, int ranks, const ncclUniqueId *id, int rank, ncclComm_t *made,
                          ncclConfig_t *config);
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *made, int flags);
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window);
/* For kernels of the application's own; local to the rank when it ends. */
typedef struct { ncclComm_t comm; } ncclDevComm_t;
ncclResult_t ncclDevCommCreate(ncclComm_t comm, const void *requirements, ncclDevComm_t *made);
ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const ncclDevComm_t *made);
/* Memory of the caller's. */
ncclResult_t ncclMemAlloc(void **address, size_t bytes);
ncclResult_t ncclMemFree(void *address);
ncclResult_t ncclPutSignal(const void *data, size_t count, ncclDataType_t kind, int peer, ncclWindow_t window,
                           size_t offset, int index, int context, unsigned flags, ncclComm_t comm, ncclStream_t stream);
ncclResult_t ncclSignal(int peer, int index, int context, unsigned flags, ncclComm_t comm, ncclStream_t stream);
ncclResult_t ncclWaitSignal(int count, ncclWaitSignalDesc_t *descriptors, ncclComm_t comm, ncclStream_t stream);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

/* Not of NCCL's interface: the same as a sum, by a way of its own. For libraries that launch work by themselves. */
ncclResult_t simnccl_exchange(void *data, size_t count, ncclComm_t comm, ncclStream_t stream);

#endif
