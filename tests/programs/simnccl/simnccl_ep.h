/* The part of NCCL EP's public interface that the simulated NCCL EP has, declared from its documentation. What it reads
 * of its structures is its own. */
#ifndef SUBLET_TEST_SIMNCCL_EP_H
#define SUBLET_TEST_SIMNCCL_EP_H

#include "simnccl.h"

/* How many words an exchange is about. */
#define EXCHANGED 512

typedef struct ncclEpGroup *ncclEpGroup_t;
typedef struct ncclEpHandle *ncclEpHandle_t;
typedef struct {
    void *workspace;
    ncclStream_t stream;
} ncclEpGroupConfig_t;

ncclResult_t ncclEpGetVersion(int *version);
ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *made, ncclComm_t comm, const ncclEpGroupConfig_t *config);
ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t group);
ncclResult_t ncclEpInitHandle(ncclEpHandle_t *made, ncclEpGroup_t group, int layout, const void *config, int choices,
                              const void *memory);
ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const void *choices, const void *information,
                                ncclStream_t stream);
ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *made, ncclEpGroup_t group, int layout, const void *choices,
                                const void *information, const void *config, ncclStream_t stream);
ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle);
ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const void *inputs, const void *outputs, const void *information,
                            const void *config, ncclStream_t stream);
ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const void *inputs, const void *outputs, const void *config,
                           ncclStream_t stream);

#endif
