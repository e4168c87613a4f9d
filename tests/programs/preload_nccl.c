/* A library that calls itself NCCL. It says which one it is, and how often its functions were called, through
 * functions that NCCL does not have. WHICH tells copies apart. */
#define _GNU_SOURCE
#include "file_of.h"

#include <pthread.h>
#include <stddef.h>

static int calls;
static const char *called_from = "nowhere";

int ncclGetVersion(int *version)
{
    *version = WHICH;
    return 0;
}

int ncclAllReduce(const void *send, void *receive, size_t count, int kind, int op, void *comm, void *stream)
{
    (void)send, (void)receive, (void)kind, (void)op, (void)comm, (void)stream;
    calls++;
    called_from = file_of(__builtin_return_address(0));
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

/* The file whose code called ncclAllReduce last. */
const char *nccl_called_from(void)
{
    return called_from;
}

static void *own_thread(void *answer)
{
    *(int *)answer = ncclAllReduce(NULL, NULL, 0, 7, 0, NULL, NULL);
    return NULL;
}

/* Calls ncclAllReduce from a thread of its own. */
int nccl_calls_itself(void)
{
    pthread_t thread;
    int answer = -1;
    if (pthread_create(&thread, NULL, own_thread, &answer) == 0)
        pthread_join(thread, NULL);
    return answer;
}
