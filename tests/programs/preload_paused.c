/* What a process may call while it has paused itself, one word an argument:
 *
 *   questions   about host memory, plain memory, mapped memory and memory of a stream: as before the pause
 *   teardown    of memory that never left: fills, copies and frees that a library makes when it ends
 *   touch       a fill of memory that is away waits for the resume
 *
 * It prints the same with and without Sublet. */
#include "driver.h"
#include "inside.h"

#include <pthread.h>
#include <stdbool.h>

/* The driver answers no list that has one of the last three. */
enum { BYTES = 8 << 20, PAGE = 2 << 20, LISTED = 13, QUESTIONS = 16 };

/* Context, type, address, managed, device, IPC, start, size, mapped, kinds of handles; synchronous copies, number, rights;
 * tokens, number of the block, decompression. */
static const int asked[QUESTIONS] = {1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 6, 7, 16, 5, 20, 21};

typedef struct {
    CUresult codes[QUESTIONS], list_code, last_code, access_code, range_code;
    uint64_t values[QUESTIONS], list[QUESTIONS], access, start;
    size_t size;
} Answers;

static Answers ask(CUdeviceptr address)
{
    Answers answers;
    void *places[QUESTIONS];
    int attributes[QUESTIONS];
    CUlocation place = {1, 0};
    memset(&answers, 0, sizeof answers);
    for (int i = 0; i < QUESTIONS; i++) {
        answers.codes[i] = cuPointerGetAttribute(&answers.values[i], asked[i], address);
        places[i] = &answers.list[i];
        attributes[i] = asked[i];
    }
    answers.list_code = cuPointerGetAttributes(LISTED, attributes, places, address);
    answers.last_code = cuPointerGetAttributes(1, attributes + QUESTIONS - 1, places + QUESTIONS - 1, address);
    answers.access_code = cuMemGetAccess(&answers.access, &place, address);
    answers.range_code = cuMemGetAddressRange(&answers.start, &answers.size, address);
    return answers;
}

static void questions(void)
{
    enum { KINDS = 5 };
    static const char *const names[KINDS] = {"host", "plain", "small", "mapped", "of a stream"};
    CUdeviceptr addresses[KINDS], reserved = 0;
    Answers before[KINDS];
    CUstream stream = NULL;
    CUprop prop = driver_prop();
    CUaccess access = {{1, 0}, 3};
    CUhandle handle = 0;
    void *host = NULL;
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAllocHost(&host, 4096));
    addresses[0] = (CUdeviceptr)(uintptr_t)host;
    OK(cuMemAlloc(&addresses[1], BYTES + 5));
    addresses[1] += 4096;
    OK(cuMemAlloc(&addresses[2], 512));
    /* Its reservation is larger than what is mapped in it. */
    OK(cuMemAddressReserve(&reserved, 4 * PAGE, 0, 0, 0));
    OK(cuMemCreate(&handle, PAGE, &prop, 0));
    OK(cuMemMap(reserved + PAGE, PAGE, 0, handle, 0));
    OK(cuMemSetAccess(reserved + PAGE, PAGE, &access, 1));
    OK(cuMemRelease(handle));
    addresses[3] = reserved + PAGE + 64;
    OK(cuMemAllocAsync(&addresses[4], 4096, stream));
    OK(cuStreamSynchronize(stream));
    for (int kind = 0; kind < KINDS; kind++)
        before[kind] = ask(addresses[kind]);
    printf("plain memory: by IPC %llu, kinds of handles %llu\n", (unsigned long long)before[1].values[5],
        (unsigned long long)before[1].values[9]);
    inside_pause();
    for (int kind = 0; kind < KINDS; kind++) {
        Answers now = ask(addresses[kind]);
        printf("%s: type %llu, code %d, %s\n", names[kind], (unsigned long long)now.values[1], now.list_code,
            memcmp(&now, &before[kind], sizeof now) == 0 ? "as before" : "changed");
        for (int i = 0; i < QUESTIONS; i++)
            if (now.values[i] != before[kind].values[i] || now.list[i] != before[kind].list[i])
                printf("  attribute %d: %llx and %llx, not %llx and %llx\n", asked[i],
                    (unsigned long long)now.values[i], (unsigned long long)now.list[i],
                    (unsigned long long)before[kind].values[i], (unsigned long long)before[kind].list[i]);
    }
    inside_resume();
    OK(cuMemFree(addresses[1] - 4096));
}

static void teardown(void)
{
    CUdeviceptr tensor = 0, own = 0, small = 0;
    CUstream stream = NULL;
    uint32_t *host = NULL, plain[4] = {0, 0, 0, 0};
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAlloc(&tensor, BYTES));
    OK(cuMemAlloc(&small, 4096));
    OK(cuMemAllocAsync(&own, 4096, stream));
    OK(cuMemAllocHost((void **)&host, 4096));
    OK(cuStreamSynchronize(stream));
    inside_pause();
    OK(cuMemsetD32Async(own, 7, 1024, stream));
    OK(cuMemsetD8(small, 1, 4096));
    OK(cuCtxSynchronize());
    OK(cuMemcpyDtoDAsync(own, small, 8, stream));
    OK(cuMemcpyDtoHAsync(host, own, 4096, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuMemcpyDtoH(plain, own + 4, sizeof plain));
    printf("copied %x %x %x, %x %x\n", host[0], host[1], host[2], plain[0], plain[1]);
    OK(cuMemFreeAsync(own, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuMemFree(small));
    OK(cuMemFreeAsync(tensor, stream));
    OK(cuMemFreeHost(host));
    OK(cuStreamSynchronize(stream));
    inside_resume();
    printf("free again: %d\n", cuMemFree(tensor));
}

static CUdeviceptr target;
static CUcontext context;
static volatile bool is_resumed, was_resumed;

static void *fill(void *unused)
{
    (void)unused;
    OK(cuCtxSetCurrent(context));
    OK(cuMemsetD8(target, 9, BYTES));
    was_resumed = is_resumed;
    return NULL;
}

static void touch(void)
{
    unsigned char byte = 0;
    pthread_t thread;
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuMemAlloc(&target, BYTES));
    inside_pause();
    if (pthread_create(&thread, NULL, fill, NULL) != 0)
        exit(1);
    usleep(100000);
    is_resumed = true;
    inside_resume();
    pthread_join(thread, NULL);
    OK(cuMemcpyDtoH(&byte, target + BYTES - 1, 1));
    bool is_here = dlsym(RTLD_DEFAULT, "sublet_pause_tenant") != NULL;
    printf("filled with %d, %s\n", byte, was_resumed || !is_here ? "when it was there" : "too early");
    OK(cuMemFree(target));
}

int main(int count, char **words)
{
    inside_deadline(20);
    driver_start();
    for (int i = 1; i < count; i++) {
        if (strcmp(words[i], "questions") == 0)
            questions();
        else if (strcmp(words[i], "teardown") == 0)
            teardown();
        else if (strcmp(words[i], "touch") == 0)
            touch();
    }
    return 0;
}
