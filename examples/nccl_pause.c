/* A C program that gives all of its GPU memory back by ncclPause, and takes it again by ncclResume.
 *
 *     cc -o nccl_pause examples/nccl_pause.c -ldl
 *     sublet run --tenant train -- ./nccl_pause
 *
 * You see what is free on GPU 0 before, while the process is paused, and after, and that its bytes are as they were.
 * Every process of a tenant makes these calls, as in AMem; here there is one. They are found in the process, so that the
 * program starts without Sublet too, and then says so.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define SIZE_BYTES ((size_t)64 << 20)

static void *driver;

/* Calls the driver; ends the program when that fails. */
#define CALL(name, ...)                                                          \
    do {                                                                         \
        int (*function)() = (int (*)())dlsym(driver, name);                      \
        int code = function != NULL ? function(__VA_ARGS__) : -1;                \
        if (code != 0) {                                                         \
            fprintf(stderr, "%s failed with %d\n", name, code);                  \
            return 1;                                                            \
        }                                                                        \
    } while (0)

static int show(const char *when) {
    size_t free_bytes, total_bytes;
    CALL("cuMemGetInfo_v2", &free_bytes, &total_bytes);
    printf("%-10s %zu MiB free\n", when, free_bytes >> 20);
    return 0;
}

int main(void) {
    static unsigned char bytes[4096], back[4096];
    int (*pause)(void *) = (int (*)(void *))dlsym(RTLD_DEFAULT, "ncclPause");
    int (*resume)(void *) = (int (*)(void *))dlsym(RTLD_DEFAULT, "ncclResume");
    uint64_t address;
    void *context;

    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL || pause == NULL || resume == NULL) {
        fprintf(stderr, "%s: start it with: sublet run --tenant train -- ./nccl_pause\n", driver == NULL ? dlerror() : "no ncclPause");
        return 2;
    }
    CALL("cuInit", 0);
    CALL("cuDevicePrimaryCtxRetain", &context, 0);
    CALL("cuCtxSetCurrent", context);
    CALL("cuMemAlloc_v2", &address, SIZE_BYTES);
    memset(bytes, 7, sizeof bytes);
    CALL("cuMemcpyHtoD_v2", address, bytes, sizeof bytes);
    if (show("before") != 0) return 1;
    printf("ncclPause  %d\n", pause(NULL));
    if (show("paused") != 0) return 1;
    printf("ncclResume %d\n", resume(NULL));
    if (show("resumed") != 0) return 1;
    CALL("cuMemcpyDtoH_v2", back, address, sizeof back);
    puts(memcmp(bytes, back, sizeof bytes) == 0 ? "the bytes are as they were" : "the bytes are NOT as they were");
    return memcmp(bytes, back, sizeof bytes) != 0;
}
