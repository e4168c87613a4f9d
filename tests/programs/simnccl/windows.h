/* Memory that is registered as a window, and the like. At the end of simnccl.c. */
#ifndef SUBLET_TEST_SIMNCCL_WINDOWS_H
#define SUBLET_TEST_SIMNCCL_WINDOWS_H

struct Window {
    ncclComm_t comm;
};

/* Collective. The communicator has a table of its windows in stream-ordered memory, as NCCL's has. */
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *made, int flags)
{
    if (buffer == NULL || bytes == 0 || flags != 0)
        return ncclInvalidArgument;
    if (alive(comm)->table == 0) {
        OK(cuMemAllocAsync(&comm->table, 4096, NULL));
        OK(cuStreamSynchronize(NULL));
    }
    meet_all(comm);
    *made = malloc(sizeof **made);
    (*made)->comm = comm;
    comm->windows++;
    return ncclSuccess;
}

/* Collective. */
ncclResult_t ncclDevCommCreate(ncclComm_t comm, const void *requirements, ncclDevComm_t *made)
{
    (void)requirements;
    meet_all(alive(comm));
    made->comm = comm;
    return ncclSuccess;
}

ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const ncclDevComm_t *made)
{
    return made->comm == alive(comm) ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclMemAlloc(void **address, size_t bytes)
{
    CUdeviceptr made = 0;
    OK(cuMemAlloc(&made, bytes));
    *address = (void *)made;
    return ncclSuccess;
}

ncclResult_t ncclMemFree(void *address)
{
    OK(cuMemFree((CUdeviceptr)address));
    return ncclSuccess;
}

/* Local to the rank. */
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window)
{
    if (window->comm != alive(comm))
        return ncclInvalidArgument;
    comm->windows--;
    free(window);
    return ncclSuccess;
}

#endif
