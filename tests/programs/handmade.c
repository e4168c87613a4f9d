/* One rank of an all-reduce that is written by hand: kernels that write to peers and wait for them, which nobody
 * counts, as vLLM's, DeepEP's and those on symmetric memory do. It obeys lines on standard input and answers each with one
 * line:
 *
 *   connect    opens the others' memory
 *   steps N    launches N steps, far ahead of the device, and waits for them
 *   post       posts the next receive, on a stream of its own
 *   step       computes and sends, in the order of its stage, and waits for all of it
 *   forever    launches a kernel that waits for what never comes
 *   verify     compares its data with what they must be
 *   exit
 *
 * usage: handmade RANK RANKS DIR [helper|capture|KERNELS]
 *
 * In a step each rank changes its data, writes them into a slot of each peer's inbox, raises a flag there, waits for the
 * flags that the others raise here, and adds what they have written. With `helper` another thread launches what goes to
 * the peers, some milliseconds later and on a stream of its own: then a kernel waits for a launch by a thread of its own
 * process. With `capture` each tenth step is a graph, captured and launched.
 *
 * With a number the two ranks are stages of a pipeline, whose receives are posted before the work that they follow. Rank 0
 * launches so many kernels on its other stream, then sends, then waits for what it has posted. Rank 1 waits first.
 */
#include "../simcuda/programs/driver.h"
#include "lines.h"

#include <pthread.h>
#include <semaphore.h>
#include <time.h>

enum { RANKS_MAX = 8, WORDS = 64, BYTES = 4 * WORDS, BLOCK = 2 << 20, SLOTS = 2 };

static struct {
    int rank, ranks, kernels;
    const char *dir;
    bool helper, capture;
    CUcontext context;
    CUstream stream, other;
    CUevent event;
    CUdeviceptr data, shared, peer[RANKS_MAX];
    CUfunction affine, add, store, await;
    uint32_t step;
    unsigned seed;
    sem_t wanted, given;
} own;

/* In a rank's shared memory: a slot of data for each rank and each of two steps, and a flag for each rank. */
static CUdeviceptr slot(CUdeviceptr shared, int from, uint32_t step)
{
    return shared + (CUdeviceptr)(((int)(step % SLOTS) * RANKS_MAX + from) * BYTES);
}

static CUdeviceptr flag(CUdeviceptr shared, int from)
{
    return shared + (CUdeviceptr)(SLOTS * RANKS_MAX * BYTES + from * 128);
}

static void launch(CUfunction function, CUstream stream, void **params)
{
    OK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, params, NULL));
}

static void nap(unsigned most_us)
{
    struct timespec time = {0, 1000L * (long)(rand_r(&own.seed) % (most_us + 1))};
    nanosleep(&time, NULL);
}

/* Writes this rank's data to all others and says so. Its own flag comes last: then the data may change. */
static void give(uint32_t step, CUstream stream)
{
    uint32_t raised = step + 1;
    for (int hop = 1; hop <= own.ranks; hop++) {
        int peer = (own.rank + hop) % own.ranks;
        CUdeviceptr to = flag(own.peer[peer], own.rank);
        void *params[] = {&to, &raised};
        OK(cuMemcpyDtoDAsync(slot(own.peer[peer], own.rank, step), own.data, BYTES, stream));
        launch(own.store, stream, params);
    }
}

/* Waits for all others' and adds theirs. */
static void take(uint32_t step)
{
    uint32_t raised = step + 1;
    for (int peer = 0; peer < own.ranks; peer++) {
        CUdeviceptr from = flag(own.shared, peer);
        void *params[] = {&from, &raised};
        launch(own.await, own.stream, params);
    }
    for (int peer = 0; peer < own.ranks; peer++) {
        if (peer == own.rank)
            continue;
        CUdeviceptr from = slot(own.shared, peer, step);
        uint64_t count = WORDS;
        void *params[] = {&own.data, &own.data, &from, &count};
        launch(own.add, own.stream, params);
    }
}

static void *help(void *unused)
{
    OK(cuCtxSetCurrent(own.context));
    for (;;) {
        sem_wait(&own.wanted);
        uint32_t step = own.step;
        nap(3000);
        OK(cuStreamWaitEvent(own.other, own.event, 0));
        give(step, own.other);
        sem_post(&own.given);
    }
    return unused;
}

static void work(uint32_t step)
{
    uint32_t mul = 3, add = (uint32_t)own.rank + step;
    uint64_t count = WORDS;
    void *params[] = {&own.data, &mul, &add, &count};
    launch(own.affine, own.stream, params);
    if (own.helper) {
        OK(cuEventRecord(own.event, own.stream));
        sem_post(&own.wanted);
        take(step);
        sem_wait(&own.given);
    } else {
        give(step, own.stream);
        take(step);
    }
}

static void work_as_graph(uint32_t step)
{
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    OK(cuStreamBeginCapture(own.stream, 1));
    work(step);
    OK(cuStreamEndCapture(own.stream, &graph));
    OK(cuGraphInstantiate(&exec, graph, 0));
    OK(cuGraphLaunch(exec, own.stream));
    OK(cuStreamSynchronize(own.stream));
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphDestroy(graph));
}

static void do_steps(int count)
{
    for (int i = 0; i < count; i++, own.step++) {
        if (own.capture && own.step % 10 == 9)
            work_as_graph(own.step);
        else
            work(own.step);
        nap(300);
        if (own.step % 50 == 49)
            OK(cuStreamSynchronize(own.stream));
    }
    OK(cuStreamSynchronize(own.stream));
    printf("ok %u\n", own.step);
}

/* ---- stages of a pipeline */

static void post(void)
{
    CUdeviceptr from = flag(own.shared, 1 - own.rank);
    uint32_t raised = own.step + 1;
    void *params[] = {&from, &raised};
    launch(own.await, own.other, params);
    OK(cuEventRecord(own.event, own.other));
    printf("ok posted\n");
}

static void compute_and_send(void)
{
    uint32_t mul = 3, add = (uint32_t)own.rank + 1, raised = own.step + 1;
    uint64_t count = WORDS;
    CUdeviceptr to = flag(own.peer[1 - own.rank], own.rank);
    void *params[] = {&own.data, &mul, &add, &count}, *flag_params[] = {&to, &raised};
    for (int i = 0; i < own.kernels; i++)
        launch(own.affine, own.stream, params);
    launch(own.store, own.stream, flag_params);
}

static void do_stage(void)
{
    if (own.rank == 0)
        compute_and_send();
    OK(cuStreamWaitEvent(own.stream, own.event, 0));
    if (own.rank != 0)
        compute_and_send();
    OK(cuStreamSynchronize(own.stream));
    printf("ok %u\n", ++own.step);
}

static uint32_t expected_of_stage(void)
{
    uint32_t word = (uint32_t)own.rank + 1;
    for (uint64_t i = 0; i < (uint64_t)own.step * (uint64_t)own.kernels; i++)
        word = word * 3 + (uint32_t)own.rank + 1;
    return word;
}

/* What all ranks have when `steps` are done, computed here. */
static uint32_t expected(uint32_t steps)
{
    uint32_t all[RANKS_MAX];
    for (int rank = 0; rank < own.ranks; rank++)
        all[rank] = (uint32_t)(rank + 1);
    for (uint32_t step = 0; step < steps; step++) {
        uint32_t sum = 0;
        for (int rank = 0; rank < own.ranks; rank++)
            sum += all[rank] = all[rank] * 3 + (uint32_t)rank + step;
        for (int rank = 0; rank < own.ranks; rank++)
            all[rank] = sum;
    }
    return all[own.rank];
}

static void verify(void)
{
    uint32_t words[WORDS], wanted = own.kernels > 0 ? expected_of_stage() : expected(own.step);
    OK(cuMemcpyDtoHAsync(words, own.data, BYTES, own.stream));
    OK(cuStreamSynchronize(own.stream));
    for (int i = 0; i < WORDS; i++) {
        if (words[i] != wanted) {
            printf("no word %d after %u steps: %u, not %u\n", i, own.step, words[i], wanted);
            return;
        }
    }
    printf("ok %u\n", own.step);
}

static void path_of(int rank, char *path, size_t size)
{
    snprintf(path, size, "%s/handle%d", own.dir, rank);
}

static void publish(void)
{
    char path[512], new_path[520];
    CUipcMemHandle handle;
    OK(cuIpcGetMemHandle(&handle, own.shared));
    path_of(own.rank, path, sizeof path);
    snprintf(new_path, sizeof new_path, "%s.new", path);
    FILE *file = fopen(new_path, "w");
    if (file == NULL || fwrite(&handle, sizeof handle, 1, file) != 1 || fclose(file) != 0 || rename(new_path, path) != 0)
        exit(1);
}

/* All have published theirs. */
static void open_peers(void)
{
    for (int peer = 0; peer < own.ranks; peer++) {
        char path[512];
        CUipcMemHandle handle;
        if (peer == own.rank) {
            own.peer[peer] = own.shared;
            continue;
        }
        path_of(peer, path, sizeof path);
        FILE *file = fopen(path, "r");
        if (file == NULL || fread(&handle, sizeof handle, 1, file) != 1)
            exit(1);
        fclose(file);
        OK(cuIpcOpenMemHandle(&own.peer[peer], handle, 1));
    }
    printf("ok connected\n");
}

static void wait_for_ever(void)
{
    CUdeviceptr from = flag(own.shared, own.rank);
    uint32_t never = 0x7fffffff;
    void *params[] = {&from, &never};
    launch(own.await, own.other, params);
    printf("ok launched\n");
}

/* Kernels that never end are left to the driver. */
static void exit_now(void)
{
    fflush(stdout);
    _exit(0);
}

static void start(void)
{
    CUmodule module = NULL;
    driver_load();
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&own.context, own.rank));
    OK(cuCtxSetCurrent(own.context));
    OK(cuStreamCreate(&own.stream, 1));
    OK(cuStreamCreate(&own.other, 1));
    OK(cuEventCreate(&own.event, 0));
    OK(cuModuleLoadData(&module, "image"));
    OK(cuModuleGetFunction(&own.affine, module, "affine_u32"));
    OK(cuModuleGetFunction(&own.add, module, "add_u32"));
    OK(cuModuleGetFunction(&own.store, module, "store_u32"));
    OK(cuModuleGetFunction(&own.await, module, "wait_at_least_u32"));
    OK(cuMemAlloc(&own.data, BLOCK));
    OK(cuMemAlloc(&own.shared, BLOCK));
    OK(cuMemsetD32Async(own.data, (unsigned)own.rank + 1, WORDS, own.stream));
    OK(cuMemsetD32Async(own.shared, 0, BLOCK / 4, own.stream));
    OK(cuStreamSynchronize(own.stream));
    own.seed = (unsigned)own.rank + 1;
    sem_init(&own.wanted, 0, 0);
    sem_init(&own.given, 0, 0);
    pthread_t thread;
    if (own.helper && pthread_create(&thread, NULL, help, NULL) != 0)
        exit(1);
    publish();
    printf("ok ready\n");
}

static void obey(const char *line)
{
    if (is(line, "connect"))
        open_peers();
    else if (is(line, "steps "))
        do_steps(atoi(line + 6));
    else if (is(line, "post"))
        post();
    else if (is(line, "step"))
        do_stage();
    else if (is(line, "forever"))
        wait_for_ever();
    else if (is(line, "verify"))
        verify();
    else
        exit_now();
}

int main(int count, char **arguments)
{
    lines_begin();
    if (count < 4)
        return 1;
    own.rank = atoi(arguments[1]);
    own.ranks = atoi(arguments[2]);
    own.dir = arguments[3];
    own.helper = count > 4 && strcmp(arguments[4], "helper") == 0;
    own.capture = count > 4 && strcmp(arguments[4], "capture") == 0;
    own.kernels = count > 4 ? atoi(arguments[4]) : 0;
    start();
    lines_obey(obey);
    exit_now();
}
