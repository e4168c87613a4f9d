/* One of two stages of a pipeline whose receives are posted before the work that they follow, by kernels that nobody counts. It
 * obeys lines on standard input and answers each with one line:
 *
 *   connect    opens the other's memory
 *   post       posts the next receive, on a stream of its own
 *   step       computes and sends, in the order of its stage, and waits for all of it
 *   verify     compares its data with what they must be
 *   exit
 *
 * usage: preposted RANK DIR KERNELS
 *
 * Rank 0 launches so many kernels on its other stream, then sends, then waits for what it has posted. Rank 1 waits first.
 */
#include "../simcuda/programs/driver.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { WORDS = 64, BLOCK = 2 << 20 };

static struct {
    int rank, kernels;
    const char *dir;
    CUcontext context;
    CUstream stream, other;
    CUevent event;
    CUdeviceptr data, shared, peer;
    CUfunction affine, store, await;
    uint32_t step;
} own;

static void launch(CUfunction function, CUstream stream, void **params)
{
    OK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, params, NULL));
}

static void post(void)
{
    uint32_t raised = own.step + 1;
    void *params[] = {&own.shared, &raised};
    launch(own.await, own.other, params);
    OK(cuEventRecord(own.event, own.other));
    printf("ok posted\n");
}

static void compute(void)
{
    uint32_t mul = 3, add = (uint32_t)own.rank + 1;
    uint64_t count = WORDS;
    void *params[] = {&own.data, &mul, &add, &count};
    for (int i = 0; i < own.kernels; i++)
        launch(own.affine, own.stream, params);
}

static void give(void)
{
    uint32_t raised = own.step + 1;
    void *params[] = {&own.peer, &raised};
    launch(own.store, own.stream, params);
}

static void do_step(void)
{
    if (own.rank == 0) {
        compute();
        give();
        OK(cuStreamWaitEvent(own.stream, own.event, 0));
    } else {
        OK(cuStreamWaitEvent(own.stream, own.event, 0));
        compute();
        give();
    }
    OK(cuStreamSynchronize(own.stream));
    printf("ok %u\n", ++own.step);
}

static void verify(void)
{
    uint32_t words[WORDS], wanted = (uint32_t)own.rank + 1;
    for (uint64_t i = 0; i < (uint64_t)own.step * (uint64_t)own.kernels; i++)
        wanted = wanted * 3 + (uint32_t)own.rank + 1;
    OK(cuMemcpyDtoHAsync(words, own.data, sizeof words, own.stream));
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

static void open_peer(void)
{
    char path[512];
    CUipcMemHandle handle;
    path_of(1 - own.rank, path, sizeof path);
    FILE *file = fopen(path, "r");
    if (file == NULL || fread(&handle, sizeof handle, 1, file) != 1)
        exit(1);
    fclose(file);
    OK(cuIpcOpenMemHandle(&own.peer, handle, 1));
    printf("ok connected\n");
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
    OK(cuModuleGetFunction(&own.store, module, "store_u32"));
    OK(cuModuleGetFunction(&own.await, module, "wait_at_least_u32"));
    OK(cuMemAlloc(&own.data, BLOCK));
    OK(cuMemAlloc(&own.shared, BLOCK));
    OK(cuMemsetD32Async(own.data, (unsigned)own.rank + 1, WORDS, own.stream));
    OK(cuMemsetD32Async(own.shared, 0, BLOCK / 4, own.stream));
    OK(cuStreamSynchronize(own.stream));
    publish();
    printf("ok ready\n");
}

int main(int count, char **arguments)
{
    char line[64];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (count < 4)
        return 1;
    own.rank = atoi(arguments[1]);
    own.dir = arguments[2];
    own.kernels = atoi(arguments[3]);
    start();
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (strcmp(line, "connect") == 0)
            open_peer();
        else if (strcmp(line, "post") == 0)
            post();
        else if (strcmp(line, "step") == 0)
            do_step();
        else if (strcmp(line, "verify") == 0)
            verify();
        else
            break;
    }
    fflush(stdout);
    _exit(0);
}
