/* Linked against NVML, as few programs are: prints total, free and used of the first GPU, then the same to a child that it forks. */
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

int nvmlInit_v2(void);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device);
int nvmlDeviceGetMemoryInfo(void *device, void *memory);

static int tell(void)
{
    unsigned long long memory[3] = {0};
    void *device = NULL;
    int code = nvmlInit_v2();
    if (code == 0)
        code = nvmlDeviceGetHandleByIndex_v2(0, &device);
    if (code == 0)
        code = nvmlDeviceGetMemoryInfo(device, memory);
    printf("%d %llu %llu %llu\n", code, memory[0], memory[1], memory[2]);
    fflush(stdout);
    return code;
}

int main(void)
{
    int status = 0, code = tell();
    pid_t child = fork();
    if (child == 0)
        _exit(tell());
    waitpid(child, &status, 0);
    return code != 0 || status != 0;
}
