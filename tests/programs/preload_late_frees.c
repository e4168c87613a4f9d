/* A block of cuMemAlloc is freed in the order of a stream whose work waits for what this very thread does next, one word an
 * argument:
 *
 *   order     the free returns, the block is used by work before it, and is gone after that
 *   twice     it is freed again before the stream comes there: only with Sublet, without it this is wrong
 *   inside    the driver refuses to free it, and the program asks for free memory in the midst of another call, then behind it
 *   next      the driver refuses to free it, and others are freed in the same way; it waits for the end of its input
 *
 * The first prints the same with and without Sublet. */
#include "driver.h"
#include "inside.h"

#include <signal.h>
#include <stdbool.h>
#include <sys/mman.h>

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

/* Waits until the driver has refused a call of that name. It writes such calls to a file. */
static void await_refusal(const char *call)
{
    char line[128];
    for (;;) {
        FILE *list = fopen(getenv("CUDA_LOG_FILE"), "r");
        while (list != NULL && fgets(line, sizeof line, list) != NULL)
            if (strncmp(line, call, strlen(call)) == 0) {
                fclose(list);
                return;
            }
        if (list != NULL)
            fclose(list);
        usleep(1000);
    }
}

static void go_on(void)
{
    OK(cuMemsetD32Async(flag, 1, 1, other));
    OK(cuStreamSynchronize(working));
}

static long page_bytes;
static void **guarded;
static size_t seen_inside;

/* The driver has come to the arguments of a launch. */
static void at_arguments(int signal)
{
    (void)signal;
    if (mprotect(guarded, (size_t)page_bytes, PROT_READ | PROT_WRITE) != 0)
        _exit(1);
    seen_inside = driver_free_bytes();
}

static void inside(void)
{
    page_bytes = sysconf(_SC_PAGESIZE);
    guarded = mmap(NULL, (size_t)page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (guarded == MAP_FAILED)
        exit(1);
    guarded[0] = &flag;
    go_on();
    await_refusal("cuMemUnmap");
    struct sigaction action = {.sa_handler = at_arguments};
    if (sigaction(SIGSEGV, &action, NULL) != 0 || mprotect(guarded, (size_t)page_bytes, PROT_NONE) != 0)
        exit(1);
    driver_launch("spin_until_nonzero", working, guarded);
    printf("inside: %lld bytes less are free, ", (long long)before - (long long)seen_inside);
    printf("and behind it %lld\n", (long long)before - (long long)driver_free_bytes());
}

static void next(void)
{
    CUdeviceptr second = 0, third = 0, start = 0;
    size_t bytes = 0;
    OK(cuMemAlloc(&second, BYTES));
    OK(cuMemAlloc(&third, BYTES));
    go_on();
    await_refusal("cuMemUnmap");
    OK(cuMemFreeAsync(second, working));
    /* Sublet has noted the refusal when the second block is gone. */
    while (cuMemGetAddressRange(&start, &bytes, second) == CU_OK)
        usleep(1000);
    OK(cuMemFreeAsync(third, working));
    printf("%zu\n", before);
    while (getchar() != EOF)
        continue;
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
    if (count > 1 && strcmp(words[1], "inside") == 0) {
        inside();
        return 0;
    }
    if (count > 1 && strcmp(words[1], "next") == 0) {
        next();
        return 0;
    }
    printf("order: freed %s, and the work goes on: %d\n", driver_error(code), cuStreamQuery(working) == CU_NOT_READY);
    end("order");
    return 0;
}
