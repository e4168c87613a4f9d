/* An NCCL EP without GPUs, over the simulated NCCL: groups and handles, and exchanges that it launches by itself. As
 * in NCCL EP, a group's making and a handle's update wait for the other ranks by NCCL's public functions; a handle's
 * making and the ends of both are one rank's own. */
#include "simnccl/simnccl_ep.h"

#include <stdlib.h>

struct ncclEpGroup {
    ncclComm_t comm;
    void *workspace;
};

struct ncclEpHandle {
    ncclEpGroup_t group;
};

ncclResult_t ncclEpGetVersion(int *version)
{
    *version = 100;
    return ncclSuccess;
}

ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *made, ncclComm_t comm, const ncclEpGroupConfig_t *config)
{
    ncclEpGroup_t group = malloc(sizeof *group);
    *group = (struct ncclEpGroup){comm, config->workspace};
    *made = group;
    ncclResult_t result = ncclAllReduce(group->workspace, group->workspace, 1, ncclUint32, ncclSum, comm, config->stream);
    return result;
}

ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t group)
{
    free(group);
    return ncclSuccess;
}

ncclResult_t ncclEpInitHandle(ncclEpHandle_t *made, ncclEpGroup_t group, int layout, const void *config, int choices,
                              const void *memory)
{
    if (layout != 1 || config != NULL || choices != 2 || memory != NULL)
        return ncclInvalidArgument;
    *made = malloc(sizeof **made);
    (*made)->group = group;
    return ncclSuccess;
}

ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const void *choices, const void *information,
                                ncclStream_t stream)
{
    (void)choices, (void)information;
    void *workspace = handle->group->workspace;
    return ncclAllReduce(workspace, workspace, 1, ncclUint32, ncclSum, handle->group->comm, stream);
}

ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *made, ncclEpGroup_t group, int layout, const void *choices,
                                const void *information, const void *config, ncclStream_t stream)
{
    ncclResult_t result = ncclEpInitHandle(made, group, layout, config, 2, NULL);
    return result != ncclSuccess ? result : ncclEpUpdateHandle(*made, choices, information, stream);
}

ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle)
{
    free(handle);
    return ncclSuccess;
}

ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const void *inputs, const void *outputs, const void *information,
                            const void *config, ncclStream_t stream)
{
    if (outputs != NULL || information != NULL || config != NULL)
        return ncclInvalidArgument;
    return simnccl_exchange((void *)inputs, EXCHANGED, handle->group->comm, stream);
}

ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const void *inputs, const void *outputs, const void *config,
                           ncclStream_t stream)
{
    if (outputs != NULL || config != NULL)
        return ncclInvalidArgument;
    return simnccl_exchange((void *)inputs, EXCHANGED, handle->group->comm, stream);
}
