/* Commands by which a rank makes children, and ends, as Python and its libraries do. None of them uses the
 * driver in the rank itself, so they answer immediately in every phase of a pause. */
#ifndef SUBLET_TEST_RANK_CHILDREN_H
#define SUBLET_TEST_RANK_CHILDREN_H

#include "hand.h"

#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>

extern char **environ;

static int status_of(pid_t child)
{
    int status = -1;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            die("waitpid: %s", strerror(errno));
    return status;
}

/* A child without exec, as Python's multiprocessing makes: the driver refuses it, nothing of Sublet's holds it
 * up, and it runs the exit handlers that it inherited. Answers its status and the driver's code in it. */
static void command_fork(void)
{
    int ends[2], code = -1;
    if (pipe2(ends, O_CLOEXEC) != 0)
        die("pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0)
        die("fork: %s", strerror(errno));
    if (child == 0) {
        CUdeviceptr memory = 0;
        CUresult refused = cuMemAlloc(&memory, 4);
        if (write(ends[1], &refused, sizeof refused) != sizeof refused)
            _exit(1);
        exit(0);
    }
    close(ends[1]);
    if (read(ends[0], &code, sizeof code) != sizeof code)
        code = -1;
    close(ends[0]);
    answer("ok %d %d", status_of(child), code);
}

/* Forks a child that stays, for a minute at most, as a data loader's worker does. A raw one is made past the C
 * library: nobody has closed anything in it. */
static void command_leave_child(bool is_raw)
{
    pid_t child = is_raw ? (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL) : fork();
    if (child < 0)
        die("fork: %s", strerror(errno));
    if (child == 0)
        live_on();
    answer("ok %d", child);
}

/* Runs `arguments` as Python's subprocess does; puts the start of what it prints into `text`. */
static int run_child(char *const arguments[], char *text, size_t size)
{
    int ends[2];
    pid_t child = 0;
    posix_spawn_file_actions_t actions;
    if (pipe2(ends, O_CLOEXEC) != 0)
        die("pipe: %s", strerror(errno));
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    int error = posix_spawn(&child, arguments[0], &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error != 0)
        die("%s: %s", arguments[0], strerror(error));
    close(ends[1]);
    size_t used = 0;
    for (ssize_t got = 1; got > 0 && used + 1 < size; used += got > 0 ? (size_t)got : 0)
        got = read(ends[0], text + used, size - used - 1);
    text[used] = '\0';
    close(ends[0]);
    return status_of(child);
}

/* Another program: it must have no descriptor but the three usual ones and that of its own listing. */
static void command_spawn(void)
{
    char text[4096];
    char *arguments[] = {"/bin/ls", "/proc/self/fd", NULL};
    int status = run_child(arguments, text, sizeof text), count = 0;
    for (const char *at = text; *at != '\0'; at++)
        count += *at == '\n';
    answer("ok %d %d", status, count);
}

/* A rank of its own under the same preload object: it joins the tenant as a new member, and ends. */
static void command_spawn_member(void)
{
    char text[4096], path[PATH_MAX], device[16];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (length < 0)
        die("/proc/self/exe: %s", strerror(errno));
    path[length] = '\0';
    snprintf(device, sizeof device, "%d", job.device);
    char *arguments[] = {path, "--rank", "7", "--ranks", "8", "--plain", "--dir", (char *)job.dir, "--device",
                         device, NULL};
    int status = run_child(arguments, text, sizeof text);
    answer("ok %d %d", status, strncmp(text, "ok ready", 8) == 0);
}

/* Gives the preload object up as often as anybody could. */
static void command_unload(void)
{
    const char *path = getenv("LD_PRELOAD");
    void *handle = path == NULL ? NULL : dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (handle == NULL) {
        answer("no %s is not loaded", path == NULL ? "nothing" : path);
        return;
    }
    for (int i = 0; i < 8; i++)
        dlclose(handle);
    answer("ok");
}

#endif
