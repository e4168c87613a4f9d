/* A thread is cancelled while a call of it waits at the gate: at its next cancellation point, or where it stands, one word an argument:
 *
 *   deferred, asynchronous, memory (in a call that makes memory), graph (in the launch of a graph)
 */
#include "driver.h"
#include "inside.h"

#include <pthread.h>
#include <stdbool.h>

static CUcontext context;
static CUstream stream;
static CUfunction store;
static CUdeviceptr place;
static CUgraphExec executable;
static volatile bool is_asynchronous, is_memory, is_graph, is_there;

static CUresult store_one(void)
{
    uint32_t one = 1;
    void *arguments[] = {&place, &one};
    return cuLaunchKernel(store, 1, 1, 1, 32, 1, 1, 0, stream, arguments, NULL);
}

static void *launch(void *unused)
{
    CUdeviceptr more = 0;
    if (is_asynchronous)
        pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
    OK(cuCtxSetCurrent(context));
    is_there = true;
    if (is_memory)
        cuMemAlloc(&more, 4 << 20);
    else if (is_graph)
        cuGraphLaunch(executable, stream);
    else
        store_one();
    /* Without us it was not cancelled before. */
    for (;;)
        usleep(1000);
    return unused;
}

int main(int count, char **words)
{
    pthread_t thread;
    void *result = NULL;
    inside_deadline(60);
    driver_start();
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuMemAlloc(&place, 4 << 20));
    OK(cuStreamCreate(&stream, 1));
    store = driver_kernel("store_u32");
    is_asynchronous = count > 1 && strcmp(words[1], "asynchronous") == 0;
    is_memory = count > 1 && strcmp(words[1], "memory") == 0;
    is_graph = count > 1 && strcmp(words[1], "graph") == 0;
    if (is_graph) {
        CUgraph graph = NULL;
        OK(cuStreamBeginCapture(stream, 2));
        OK(store_one());
        OK(cuStreamEndCapture(stream, &graph));
        OK(cuGraphInstantiate(&executable, graph, 0));
    }
    inside_pause();
    if (pthread_create(&thread, NULL, launch, NULL) != 0)
        return 1;
    while (!is_there)
        usleep(1000);
    usleep(100000);
    pthread_cancel(thread);
    usleep(100000);
    inside_resume();
    pthread_join(thread, &result);
    printf("%s\n", result == PTHREAD_CANCELED ? "cancelled" : "returned");
    return 0;
}
