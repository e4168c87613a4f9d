/* An NVML without GPUs: what nvidia-smi, pynvml and others ask, answered from the simulated node. A holder of memory is a process that has a
 * file of the node open, so it sees every process, under Sublet or not. As strict as the real one: nothing before nvmlInit, no handle
 * but its own, no structure of an unknown version, no row beyond the caller's buffer.
 *
 * SIMCUDA_NODE: directory of the node, without which there is no driver. Its devices are the GPUs, whatever CUDA_VISIBLE_DEVICES says.
 * SIMNVML_DRIVER_VERSION: what version it claims to be.
 */
#include <ctype.h>
#include <dlfcn.h>
#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    DEVICES_MAX = 16,
    BLOCKS_MAX = 8192,
    PROCESSES_MAX = 256,
    /* What the driver keeps for itself, which CUDA does not count. */
    RESERVED_BYTES = 3 << 20,
};

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
} nvmlReturn_t;

typedef struct {
    unsigned index;
    uint64_t capacity;
    char uuid[64];
} Device, *nvmlDevice_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned pid;
    unsigned long long used;
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} nvmlProcessInfo_v2_t;

typedef struct {
    char id[33];
    uint64_t bytes;
} Block;

/* What one look at all processes has shown. */
typedef struct {
    uint64_t used;
    unsigned count;
    nvmlProcessInfo_v2_t processes[PROCESSES_MAX];
} Look;

static int users;
static unsigned device_count;
static Device devices[DEVICES_MAX];
static char node[512];

static bool has(const Block *blocks, int count, const char *id)
{
    for (int i = 0; i < count; i++)
        if (strcmp(blocks[i].id, id) == 0)
            return true;
    return false;
}

/* The block of device `index` that the descriptor at `path` holds. */
static bool block_of(const char *path, unsigned index, Block *block)
{
    char target[1024], prefix[600];
    ssize_t length = readlink(path, target, sizeof target - 1);
    if (length <= 0)
        return false;
    target[length] = '\0';
    snprintf(prefix, sizeof prefix, "%s/dev%u/h-", node, index);
    size_t start = strlen(prefix);
    return strncmp(target, prefix, start) == 0
           && sscanf(target + start, "%32[0-9a-f]-%lu", block->id, &block->bytes) == 2;
}

static void look(const Device *device, Look *found)
{
    static __thread Block all[BLOCKS_MAX], own[BLOCKS_MAX];
    int all_count = 0;
    *found = (Look){0};
    DIR *processes = opendir("/proc");
    for (struct dirent *process; processes != NULL && (process = readdir(processes)) != NULL;) {
        char folder[300];
        int own_count = 0;
        uint64_t used = 0;
        if (!isdigit((unsigned char)process->d_name[0]))
            continue;
        snprintf(folder, sizeof folder, "/proc/%s/fd", process->d_name);
        DIR *descriptors = opendir(folder);
        for (struct dirent *fd; descriptors != NULL && (fd = readdir(descriptors)) != NULL;) {
            char path[600];
            Block block;
            snprintf(path, sizeof path, "%s/%s", folder, fd->d_name);
            if (!block_of(path, device->index, &block))
                continue;
            if (own_count < BLOCKS_MAX && !has(own, own_count, block.id)) {
                own[own_count++] = block;
                used += block.bytes;
            }
            if (all_count < BLOCKS_MAX && !has(all, all_count, block.id)) {
                all[all_count++] = block;
                found->used += block.bytes;
            }
        }
        if (descriptors != NULL)
            closedir(descriptors);
        if (used > 0 && found->count < PROCESSES_MAX) {
            unsigned pid = (unsigned)atoi(process->d_name);
            found->processes[found->count++] = (nvmlProcessInfo_v2_t){pid, used, ~0U, ~0U};
        }
    }
    if (processes != NULL)
        closedir(processes);
}

static bool read_node(void)
{
    const char *given = getenv("SIMCUDA_NODE");
    char path[600], line[1024], id[33] = "";
    if (given == NULL || realpath(given, node) == NULL)
        return false;
    snprintf(path, sizeof path, "%s/node.conf", node);
    FILE *config = fopen(path, "r");
    if (config == NULL)
        return false;
    device_count = 0;
    while (fgets(line, sizeof line, config) != NULL) {
        int at = 0;
        sscanf(line, "id = %32[0-9a-f]", id);
        if (sscanf(line, "capacities_bytes =%n", &at) != 0 || at == 0)
            continue;
        for (char *rest = line + at, *end; device_count < DEVICES_MAX; rest = end) {
            uint64_t capacity = strtoull(rest, &end, 10);
            if (end == rest)
                break;
            devices[device_count] = (Device){.index = device_count, .capacity = capacity};
            device_count++;
        }
    }
    fclose(config);
    for (unsigned i = 0; i < device_count; i++) {
        unsigned bytes[16];
        for (int at = 0; at < 16; at++)
            if (sscanf(id + 2 * at, "%2x", &bytes[at]) != 1)
                return false;
        bytes[3] = (bytes[3] + i) & 0xff;
        char *text = devices[i].uuid;
        text += sprintf(text, "GPU");
        for (int at = 0; at < 16; at++)
            text += sprintf(text, at == 0 || (at >= 4 && at <= 10 && at % 2 == 0) ? "-%02x" : "%02x", bytes[at]);
    }
    return device_count > 0;
}

static nvmlReturn_t check(nvmlDevice_t device)
{
    if (users == 0)
        return NVML_ERROR_UNINITIALIZED;
    for (unsigned i = 0; i < device_count; i++)
        if (device == &devices[i])
            return NVML_SUCCESS;
    return NVML_ERROR_INVALID_ARGUMENT;
}

/* As NVML of driver 580 does: it brings the driver into the process, and starts a part of it. */
static void start_driver(void)
{
    const void *table = NULL;
    const unsigned char id[16] = {0};
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*get)(const void **, const void *) =
        driver == NULL ? NULL : (int (*)(const void **, const void *))dlsym(driver, "cuGetExportTable");
    if (get != NULL)
        get(&table, id);
}

nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    if (users == 0)
        start_driver();
    if (users == 0 && !read_node())
        return NVML_ERROR_DRIVER_NOT_LOADED;
    users++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlShutdown(void)
{
    if (users == 0)
        return NVML_ERROR_UNINITIALIZED;
    users--;
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t code)
{
    switch (code) {
    case NVML_SUCCESS: return "The operation was successful";
    case NVML_ERROR_UNINITIALIZED: return "NVML was not first initialized with nvmlInit()";
    case NVML_ERROR_INVALID_ARGUMENT: return "A supplied argument is invalid";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "An input argument is not large enough";
    default: return "Unknown Error";
    }
}

static nvmlReturn_t text_to(char *target, unsigned length, const char *text)
{
    if (users == 0)
        return NVML_ERROR_UNINITIALIZED;
    if (target == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(target, text);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    const char *claimed = getenv("SIMNVML_DRIVER_VERSION");
    return text_to(version, length, claimed != NULL ? claimed : "580.95.05");
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    if (users == 0)
        return NVML_ERROR_UNINITIALIZED;
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = device_count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    if (users == 0)
        return NVML_ERROR_UNINITIALIZED;
    if (device == NULL || index >= device_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &devices[index];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    if (users == 0)
        return NVML_ERROR_UNINITIALIZED;
    if (uuid == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; i < device_count; i++) {
        if (strcmp(devices[i].uuid, uuid) == 0) {
            *device = &devices[i];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length)
{
    nvmlReturn_t code = check(device);
    return code != NVML_SUCCESS ? code : text_to(uuid, length, device->uuid);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length)
{
    nvmlReturn_t code = check(device);
    return code != NVML_SUCCESS ? code : text_to(name, length, "Simulated GPU");
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    nvmlReturn_t code = check(device);
    if (code != NVML_SUCCESS)
        return code;
    if (index == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *index = device->index;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    nvmlReturn_t code = check(device);
    if (code != NVML_SUCCESS)
        return code;
    if (memory == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    Look found;
    look(device, &found);
    memory->total = device->capacity + RESERVED_BYTES;
    memory->used = found.used + RESERVED_BYTES;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    nvmlReturn_t code = check(device);
    if (code != NVML_SUCCESS)
        return code;
    if (memory == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (memory->version != (sizeof *memory | 2U << 24))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    Look found;
    look(device, &found);
    memory->total = device->capacity + RESERVED_BYTES;
    memory->reserved = RESERVED_BYTES;
    memory->used = found.used;
    memory->free = device->capacity - found.used;
    return NVML_SUCCESS;
}

/* Up to *count rows, by `put`; how many there are goes to *count. */
static nvmlReturn_t list(nvmlDevice_t device, unsigned *count, void *rows, void (*put)(void *, unsigned, const nvmlProcessInfo_v2_t *))
{
    nvmlReturn_t code = check(device);
    if (code != NVML_SUCCESS)
        return code;
    if (count == NULL || (*count > 0 && rows == NULL))
        return NVML_ERROR_INVALID_ARGUMENT;
    Look found;
    look(device, &found);
    unsigned room = *count;
    *count = found.count;
    if (found.count > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < found.count; i++)
        put(rows, i, &found.processes[i]);
    return NVML_SUCCESS;
}

static void put_v1(void *rows, unsigned at, const nvmlProcessInfo_v2_t *process)
{
    ((nvmlProcessInfo_v1_t *)rows)[at] = (nvmlProcessInfo_v1_t){process->pid, process->used};
}

static void put_v2(void *rows, unsigned at, const nvmlProcessInfo_v2_t *process)
{
    ((nvmlProcessInfo_v2_t *)rows)[at] = *process;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *rows)
{
    return list(device, count, rows, put_v1);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *rows)
{
    return list(device, count, rows, put_v2);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *rows)
{
    return list(device, count, rows, put_v2);
}
