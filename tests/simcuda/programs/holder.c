/* Holds memory until it is killed: holder MODE BLOCKS. Each block is one granule; MODE says what keeps it:
 * "handle", "mapping" (the handle is released), "descriptor" (everything but an exported descriptor is
 * given back), "plain" (cuMemAlloc), or "churn" (one granule after another, for ever). Prints the granularity
 * when all is held. */
#include "driver.h"

#include <unistd.h>

static void churn(size_t granule)
{
    CUprop prop = driver_prop();
    printf("%zu\n", granule);
    fflush(stdout);
    for (;;) {
        CUhandle handle = 0;
        if (cuMemCreate(&handle, granule, &prop, 0) != CU_OK)
            continue;
        CUdeviceptr address = driver_map(handle, granule);
        OK(cuMemRelease(handle));
        driver_unmap(address, granule);
    }
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    CUprop prop = driver_prop();
    size_t granule = 0;
    driver_start();
    OK(cuMemGetAllocationGranularity(&granule, &prop, 0));
    if (strcmp(argv[1], "churn") == 0)
        churn(granule);
    for (int i = 0; i < atoi(argv[2]); i++) {
        CUhandle handle = 0;
        CUdeviceptr address = 0;
        int fd = -1;
        if (strcmp(argv[1], "plain") == 0) {
            OK(cuMemAlloc(&address, granule));
            continue;
        }
        OK(cuMemCreate(&handle, granule, &prop, 0));
        if (strcmp(argv[1], "mapping") == 0) {
            driver_map(handle, granule);
            OK(cuMemRelease(handle));
        } else if (strcmp(argv[1], "descriptor") == 0) {
            OK(cuMemExportToShareableHandle(&fd, handle, CU_FD, 0));
            OK(cuMemRelease(handle));
        }
    }
    printf("%zu\n", granule);
    fflush(stdout);
    for (;;)
        pause();
}
