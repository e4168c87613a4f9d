/* One process that takes and gives device memory as it is told. It obeys lines on standard input and answers each
 * with one line: `ok ...`, or `no CODE` where the driver refuses.
 *
 *   KIND DEVICE BYTES   takes memory: create, plain, async, pitch (BYTES in one row of 64 KiB each), managed, array,
 *                       and arrays that have none yet, sparse and deferred; answers with its number
 *   free NUMBER         gives it back
 *   info DEVICE         what cuMemGetInfo says: free and total
 *   total DEVICE        what cuDeviceTotalMem says
 *   nvml INDEX          what nvmlDeviceGetMemoryInfo says of the GPU with this number: total, free and used
 *   hungry DEVICE BYTES creates, and where that is refused frees the oldest and tries again, as a caching allocator
 *                       does; answers with its number and how many were freed
 *   tag NAME, untag     a region of the calling thread
 *   user UID            obeys and acts as another user from now on
 */
#include "../simcuda/programs/driver.h"
#include "lines.h"

#include <unistd.h>

enum { DEVICES_MAX = 8, KEPT_MAX = 4096 };

typedef struct {
    char kind;
    int device;
    CUdeviceptr address;
    CUhandle handle;
    size_t bytes;
} Kept;

static CUcontext contexts[DEVICES_MAX];
static Kept kept[KEPT_MAX];
static int kept_count;

static CUresult (*total_of)(size_t *, CUdevice);
static CUresult (*alloc_pitch)(CUdeviceptr *, size_t *, size_t, size_t, unsigned);
static CUresult (*alloc_managed)(CUdeviceptr *, size_t, unsigned);
static CUresult (*array_create)(CUdeviceptr *, const void *);
static CUresult (*array_destroy)(CUdeviceptr);

static void *find(const char *name)
{
    static driver_lookup lookup;
    if (lookup == NULL)
        lookup = (driver_lookup)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGetProcAddress_v2");
    void *found = NULL;
    int status = 0;
    if (lookup(name, &found, 12000, 0, &status) != CU_OK || found == NULL)
        driver_missing(name);
    return found;
}

static void use(int device)
{
    if (contexts[device] == NULL)
        OK(cuDevicePrimaryCtxRetain(&contexts[device], device));
    OK(cuCtxSetCurrent(contexts[device]));
}

static CUresult make(Kept *made)
{
    CUprop prop = driver_prop();
    size_t pitch = 0;
    struct {
        size_t width, height, depth;
        int format;
        unsigned channels, flags;
    } wanted = {made->bytes, 0, 0, 1, 1, made->kind == 's' ? 0x40 : made->kind == 'd' ? 0x80 : 0};
    prop.location.id = made->device;
    switch (made->kind) {
    case 'c': {
        CUresult code = cuMemCreate(&made->handle, made->bytes, &prop, 0);
        CUaccess access = {{1, made->device}, 3};
        if (code != CU_OK)
            return code;
        OK(cuMemAddressReserve(&made->address, made->bytes, 0, 0, 0));
        OK(cuMemMap(made->address, made->bytes, 0, made->handle, 0));
        OK(cuMemSetAccess(made->address, made->bytes, &access, 1));
        return CU_OK;
    }
    case 'p': return cuMemAlloc(&made->address, made->bytes);
    case 'a': return cuMemAllocAsync(&made->address, made->bytes, NULL);
    case 'i': return alloc_pitch(&made->address, &pitch, 65536, made->bytes / 65536, 16);
    case 'm': return alloc_managed(&made->address, made->bytes, 1);
    default: return array_create(&made->address, &wanted);
    }
}

static CUresult give_back(Kept *gone)
{
    CUresult code = CU_OK;
    use(gone->device);
    switch (gone->kind) {
    case 'c':
        OK(cuMemUnmap(gone->address, gone->bytes));
        OK(cuMemAddressFree(gone->address, gone->bytes));
        code = cuMemRelease(gone->handle);
        break;
    case 'a':
        code = cuMemFreeAsync(gone->address, NULL);
        OK(cuStreamSynchronize(NULL));
        break;
    case 'r':
    case 's':
    case 'd': code = array_destroy(gone->address); break;
    default: code = cuMemFree(gone->address);
    }
    gone->kind = 0;
    return code;
}

static void say(CUresult code, long long number)
{
    if (code == CU_OK)
        printf("ok %lld\n", number);
    else
        printf("no %s\n", driver_error(code));
}

static CUresult keep(char kind, int device, size_t bytes)
{
    Kept *made = &kept[kept_count];
    *made = (Kept){.kind = kind, .device = device, .bytes = bytes};
    use(device);
    CUresult code = make(made);
    kept_count += code == CU_OK;
    return code;
}

static void hungry(int device, size_t bytes)
{
    int freed = 0;
    CUresult code = keep('c', device, bytes);
    for (int i = 0; i < kept_count && code == 2; i++) {
        if (kept[i].kind == 0)
            continue;
        OK(give_back(&kept[i]));
        freed++;
        code = keep('c', device, bytes);
    }
    if (code == CU_OK)
        printf("ok %d %d\n", kept_count - 1, freed);
    else
        say(code, 0);
}

static void ask_nvml(int index)
{
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *device = NULL;
    unsigned long long memory[3] = {0};
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*handle)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*info)(void *, void *) = (int (*)(void *, void *))dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    if (init() != 0 || handle((unsigned)index, &device) != 0 || info(device, memory) != 0)
        puts("no NVML");
    else
        printf("ok %llu %llu %llu\n", memory[0], memory[1], memory[2]);
}

static void region(const char *tag)
{
    int (*begin)(const char *, int) = (int (*)(const char *, int))dlsym(RTLD_DEFAULT, "sublet_region_begin");
    int (*end)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "sublet_region_end");
    int code = tag != NULL ? begin(tag, 0) : end();
    puts(code == 0 ? "ok" : "no region");
}

/* A child that outlives its parent, and holds none of its pipes. */
static void leave_child(void)
{
    pid_t child = fork();
    if (child == 0)
        live_on();
    printf(child < 0 ? "fail fork\n" : "ok %d\n", (int)child);
}

static void obey(const char *line)
{
    char word[64] = "", tag[64] = "";
    int device = 0;
    size_t size = 0, free_bytes = 0, total = 0;
    int words = sscanf(line, "%63s %d %zu", word, &device, &size);
    const char *kinds[] = {"create", "plain", "async", "ipitch", "managed", "rarray", "sparse", "deferred"};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const char *name = kinds[i] + (i == 3 || i == 5);
        if (words == 3 && strcmp(word, name) == 0) {
            CUresult code = keep(kinds[i][0], device, size);
            say(code, kept_count - 1);
            return;
        }
    }
    if (strcmp(word, "leave") == 0) {
        leave_child();
    } else if (strcmp(word, "free") == 0) {
        say(give_back(&kept[device]), device);
    } else if (strcmp(word, "info") == 0) {
        use(device);
        OK(cuMemGetInfo(&free_bytes, &total));
        printf("ok %zu %zu\n", free_bytes, total);
    } else if (strcmp(word, "total") == 0) {
        CUresult code = total_of(&total, device);
        say(code, (long long)total);
    } else if (strcmp(word, "nvml") == 0) {
        ask_nvml(device);
    } else if (strcmp(word, "hungry") == 0) {
        hungry(device, size);
    } else if (sscanf(line, "tag %63s", tag) == 1) {
        region(tag);
    } else if (strcmp(word, "user") == 0) {
        puts(seteuid((uid_t)device) == 0 ? "ok" : "no such user");
    } else if (strcmp(word, "untag") == 0) {
        region(NULL);
    } else {
        printf("fail what is '%s'?\n", line);
    }
}

int main(void)
{
    lines_begin();
    driver_load();
    OK(cuInit(0));
    *(void **)&total_of = find("cuDeviceTotalMem");
    *(void **)&alloc_pitch = find("cuMemAllocPitch");
    *(void **)&alloc_managed = find("cuMemAllocManaged");
    *(void **)&array_create = find("cuArray3DCreate");
    *(void **)&array_destroy = find("cuArrayDestroy");
    puts("ok");
    lines_obey(obey);
    return 0;
}
