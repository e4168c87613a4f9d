/* A capture is added to a graph that is there, and what it holds is launched before a pause of this process and after it. It
 * prints the same with and without Sublet. */
#include "driver.h"
#include "inside.h"

enum { WORDS = 1 << 20, RELAXED = 2 };

int main(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    CUresult (*create)(CUgraph *, unsigned) = (CUresult(*)(CUgraph *, unsigned))dlsym(driver, "cuGraphCreate");
    CUresult (*begin)(CUstream, CUgraph, const void *, const void *, size_t, int) =
        (CUresult(*)(CUstream, CUgraph, const void *, const void *, size_t, int))dlsym(driver, "cuStreamBeginCaptureToGraph");
    CUstream stream = NULL;
    CUdeviceptr data = 0;
    CUgraph graph = NULL, ended = NULL;
    CUgraphExec ready = NULL;
    inside_deadline(60);
    driver_start();
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAlloc(&data, WORDS * 4));
    driver_fill(data, 1, WORDS, stream);
    OK(create(&graph, 0));
    for (int part = 0; part < 2; part++) {
        OK(begin(stream, graph, NULL, NULL, 0, RELAXED));
        driver_affine(data, 2, 1, WORDS, stream);
        OK(cuStreamEndCapture(stream, &ended));
        printf("ended: the same graph %d\n", ended == graph);
    }
    OK(cuGraphInstantiate(&ready, graph, 0));
    OK(cuGraphLaunch(ready, stream));
    inside_pause();
    inside_resume();
    OK(cuGraphLaunch(ready, stream));
    printf("sum %llu\n", (unsigned long long)driver_sum(data, WORDS, stream));
    return 0;
}
