/* Copies of plain memory of two devices, with whichever context current, before and after a pause. It prints the same with and
 * without Sublet, and where the devices do not reach each other. */
#include "driver.h"
#include "inside.h"

enum { BYTES = 1 << 20, WORDS = BYTES / 4 };

static CUcontext contexts[2];
static CUstream streams[2];
static CUdeviceptr data[2], small[2];
static uint32_t *host;

static void use(int device)
{
    OK(cuCtxSetCurrent(contexts[device]));
}

static void fill(CUdeviceptr target, uint32_t value, int words, int device)
{
    use(device);
    OK(cuMemsetD32Async(target, value, (size_t)words, streams[device]));
    OK(cuStreamSynchronize(streams[device]));
}

static uint32_t word(CUdeviceptr source, int device)
{
    uint32_t found = 0;
    use(device);
    OK(cuMemcpyDtoHAsync(&found, source + BYTES - 4, 4, streams[device]));
    OK(cuStreamSynchronize(streams[device]));
    return found;
}

static void all(const char *when)
{
    for (int current = 0; current < 2; current++)
        for (int stream = 0; stream < 2; stream++)
            for (int from = 0; from < 2; from++) {
                fill(data[from], 100u + (uint32_t)(4 * current + 2 * stream + from), WORDS, from);
                fill(data[1 - from], 0, WORDS, 1 - from);
                use(current);
                CUresult code = cuMemcpyDtoDAsync(data[1 - from], data[from], BYTES, streams[stream]);
                OK(cuStreamSynchronize(streams[stream]));
                printf("%s: context %d, stream %d, from %d: %s, %u\n", when, current, stream, from, driver_error(code),
                    word(data[1 - from], 1 - from));
            }
    for (int current = 0; current < 2; current++)
        for (int device = 0; device < 2; device++) {
            uint32_t value = 200u + (uint32_t)(2 * current + device);
            fill(data[device], value, WORDS, device);
            use(current);
            host[WORDS - 1] = 0;
            CUresult out = cuMemcpyDtoH(host, data[device], BYTES);
            uint32_t found = host[WORDS - 1];
            host[WORDS - 1] = value + 10;
            CUresult in = cuMemcpyHtoDAsync(data[device], host, BYTES, streams[current]);
            OK(cuStreamSynchronize(streams[current]));
            printf("%s: context %d, memory of %d: %s, %u; %s, %u\n", when, current, device, driver_error(out), found,
                driver_error(in), word(data[device], device));
        }
    /* Between a block of ours and memory that the driver has kept. */
    for (int from = 0; from < 2; from++) {
        uint32_t found = 0;
        fill(small[from], 300u + (uint32_t)from, 4, from);
        use(0);
        CUresult code = cuMemcpyDtoDAsync(data[1 - from], small[from], 16, streams[0]);
        OK(cuStreamSynchronize(streams[0]));
        use(1 - from);
        OK(cuMemcpyDtoH(&found, data[1 - from], 4));
        printf("%s: small memory of %d: %s, %u\n", when, from, driver_error(code), found);
    }
}

int main(void)
{
    inside_deadline(30);
    driver_load();
    OK(cuInit(0));
    for (int device = 0; device < 2; device++) {
        OK(cuDevicePrimaryCtxRetain(&contexts[device], device));
        use(device);
        OK(cuStreamCreate(&streams[device], 1));
        OK(cuMemAlloc(&data[device], BYTES));
        OK(cuMemAlloc(&small[device], 16));
    }
    OK(cuMemAllocHost((void **)&host, BYTES));
    all("before");
    inside_pause();
    inside_resume();
    all("after");
    for (int device = 0; device < 2; device++) {
        CUdeviceptr more = 0;
        use(device);
        printf("more memory of %d: %s\n", device, driver_error(cuMemAlloc(&more, BYTES)));
    }
    return 0;
}
