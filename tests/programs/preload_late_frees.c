/* A block of cuMemAlloc is freed in the order of a stream whose work waits for what this very thread does next, one word an
 * argument:
 *
 *   order     the free returns, the block is used by work before it, and is gone after that
 *   twice     it is freed again before the stream comes there: only with Sublet, without it this is wrong
 *
 * The first prints the same with and without Sublet. */
#include "driver.h"
#include "inside.h"

enum { BYTES = 8 << 20, WORDS = BYTES / 4 };

static CUstream working, other;
static CUdeviceptr flag, block;
static size_t before;

static CUresult begin(void)
{
    OK(cuStreamCreate(&working, 1));
    OK(cuStreamCreate(&other, 1));
    OK(cuMemAlloc(&flag, 4));
    OK(cuMemsetD8(flag, 0, 4));
    OK(cuCtxSynchronize());
    before = driver_free_bytes();
    OK(cuMemAlloc(&block, BYTES));
    void *params[] = {&flag};
    driver_launch("spin_until_nonzero", working, params);
    driver_fill(block, 3, WORDS, working);
    return cuMemFreeAsync(block, working);
}

static void end(const char *what)
{
    CUpool pool = NULL;
    OK(cuMemsetD32Async(flag, 1, 1, other));
    CUresult code = cuStreamSynchronize(working);
    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    OK(cuMemPoolTrimTo(pool, 0));
    printf("%s: stream %s, %lld bytes less are free\n", what, driver_error(code), (long long)before - (long long)driver_free_bytes());
}

int main(int count, char **words)
{
    inside_deadline(120);
    driver_start();
    CUresult code = begin();
    if (count > 1 && strcmp(words[1], "twice") == 0) {
        CUresult again = cuMemFreeAsync(block, working);
        printf("twice: %s, %s\n", driver_error(again), driver_error(cuMemFree(block)));
        end("twice");
        return 0;
    }
    printf("order: freed %s, and the work goes on: %d\n", driver_error(code), cuStreamQuery(working) == CU_NOT_READY);
    end("order");
    return 0;
}
