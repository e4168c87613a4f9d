/* A library that calls itself NCCL. It says which one it is, and how often its functions were called, through
 * functions that NCCL does not have. WHICH tells copies apart. */
#include <stddef.h>

static int calls;

int ncclGetVersion(int *version)
{
    *version = WHICH;
    return 0;
}

int ncclAllReduce(const void *send, void *receive, size_t count, int kind, int op, void *comm, void *stream)
{
    (void)send, (void)receive, (void)kind, (void)op, (void)comm, (void)stream;
    calls++;
    return WHICH + (int)count;
}

int ncclGroupStart(void)
{
    return 0;
}

int ncclGroupEnd(void)
{
    return 0;
}

int nccl_calls(void)
{
    return calls;
}
