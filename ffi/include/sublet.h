/* sublet.h: the C interface of libsublet.so.
 *
 * Every function may be called from any thread. Functions that pause or resume block until it has
 * happened or failed; all others return immediately. Unless it says otherwise, a function returns 0 for
 * success and one of the SUBLET_ERROR_ codes otherwise; sublet_last_error() then says, for the calling
 * thread, what was tried on what, and what to do next.
 *
 * The calls of the ncclPause family keep the names, types and results that callers of AMem NCCL use.
 */
#ifndef SUBLET_H
#define SUBLET_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Success. */
#define SUBLET_OK 0
/* An argument is wrong: fix the call. */
#define SUBLET_ERROR_ARGUMENT 1
/* This process is not under Sublet: start it with `sublet run`. */
#define SUBLET_ERROR_NOT_JOINED 2
/* Refused or failed; the tenant is as it was before. Trying again later can succeed. */
#define SUBLET_ERROR_RETRY 3
/* Refused or failed; the tenant is as it was before. Trying the same again will fail again. */
#define SUBLET_ERROR_REFUSED 4
/* The device cannot hold the tenant now: free memory there, then try again. */
#define SUBLET_ERROR_OUT_OF_DEVICE_MEMORY 5
/* The host cannot hold the contents now: free its memory, or the disk that the message names, then try again. */
#define SUBLET_ERROR_OUT_OF_HOST_MEMORY 6
/* Something is lost: end the processes that the message names. */
#define SUBLET_ERROR_LOST 7

/* What a pause does with the contents of a region's memory: saves them to host memory, gives them up, or saves
 * them to a file (sublet_set_file_dir). */
#define SUBLET_CONTENTS_KEEP 0
#define SUBLET_CONTENTS_DISCARD 1
#define SUBLET_CONTENTS_FILE 2
/* Added to one of these: the process agrees to run on while the memory of this tag is away, also if others pause it. */
#define SUBLET_RUNS_WITHOUT 256

/* Whose memory a pause or resume by tag is about: that of every process of the tenant, or what the calling
 * process itself owns, wherever it was imported. */
#define SUBLET_WHOSE_TENANT 0
#define SUBLET_WHOSE_PROCESS 1

/* The version of the library, such as "0.1.0". Never freed. */
const char *sublet_version(void);

/* Why the last call of this thread failed, as one line; empty when none has. Valid until the next call of
 * this interface on this thread. */
const char *sublet_last_error(void);

/* Answers in JSON: each writes its text with a terminating zero to buffer[0..size) and returns the length that
 * the whole text has without the zero; when that is not less than size, nothing was written. buffer may be
 * NULL when size is 0. -1 is an error.
 *
 * sublet_last_error_json: the last error of this thread, as {"code", "message", "missing_bytes" (or null),
 * "devices" (that cannot hold the tenant, and who holds them), "tags" (that there are)}.
 * sublet_last_report_json: what this thread's last pause, resume, swap, switch, preparation or change of budgets did. "outcome" of a
 * pause is "partial" when processes were lost, or memory stays that the driver would not copy or let go ("stayed_bytes", "notes"),
 * also where the pause was made before. */
int64_t sublet_last_error_json(char *buffer, size_t size);
int64_t sublet_last_report_json(char *buffer, size_t size);

/* Does what a command in JSON says, {NAME: {FIELD: VALUE}} with the arguments of the function of that name: "pause" and "resume" ("tenant",
 * "tags", "is_own" for SUBLET_WHOSE_PROCESS, "leave_lent" of a pause, "timeout_ms"; with "tags" left out all of the tenant, with [] all tags), "pause_together" and
 * "resume_together" (ncclPause, ncclResume), "swap" ("tenant", "out_tags", "to", "in_tags", "timeout_ms"), "resume_in_turn", "switch" and "prepare"
 * ("tenant", "wait_ms"), "turn_begin" ("wait_ms"), "budget" ("tenant", "budgets", which it changes; shown when left out), "stats" ("tenant")
 * and "tenants". A tenant that is null or left out is the caller's own. What it did or found says sublet_last_report_json. */
int sublet_command(const char *json);

/* Pauses every process of a tenant on behalf of all of them; NULL is the caller's own. A tenant that is
 * paused already is a success; so is the caller's own of which no process has device memory yet, with
 * "outcome": "nothing". timeout_ms bounds each phase up to the point of no return; 0 keeps the defaults. */
int sublet_pause_tenant(const char *tenant, uint32_t timeout_ms);

/* Resumes every process of a tenant; as sublet_pause_tenant. */
int sublet_resume_tenant(const char *tenant, uint32_t timeout_ms);

/* Resumes a tenant in its place among those that wait for the GPUs: by class, and then in the order in which they asked. What is in the way is
 * paused when it has had its quantum, the least that suffices; until then this waits up to wait_ms. Errors are as of sublet_switch_tenant. */
int sublet_resume_in_turn(const char *tenant, uint32_t wait_ms);

/* Pauses one tenant and resumes the other, simultaneously and in bounded device memory. When the other cannot
 * come, the first runs again; the error says so where it does not. */
int sublet_swap_tenants(const char *from, const char *to, uint32_t timeout_ms);
/* The same by tag, with out_tags[0..out_count) of the one and in_tags[0..in_count) of the other, of all their processes as
 * sublet_pause_tags and sublet_resume_tags have it; NULL and 0 is all of that tenant. The processes of the first run on or stand
 * still as sublet_pause_tags has it, and those of the second stand still from when its first memory comes until all of it is there. */
int sublet_swap_tags(const char *from, const char *const *out_tags, size_t out_count, const char *to,
                     const char *const *in_tags, size_t in_count, uint32_t timeout_ms);

/* Has a tenant get its GPUs: pauses what is in the way there, the least that suffices, and resumes it. When it cannot come, those that were
 * paused for it run again; the error says where not. One in the way may be in a turn: then this waits up to wait_ms for the turn to end, or
 * to have lasted its quantum. SUBLET_ERROR_RETRY when that was not enough, and SUBLET_ERROR_OUT_OF_DEVICE_MEMORY when the tenant does not
 * fit even if all others made way. sublet_last_report_json says who was paused, and why. */
int sublet_switch_tenant(const char *tenant, uint32_t wait_ms);

/* A turn of the calling process: waits until its tenant has its GPUs, or may pause what is in the way, and does that. Those that wait come
 * in the order of their classes (sublet run --class), and then in the order in which they asked. wait_ms bounds the wait; 0 is ten minutes.
 * From sublet_turn_end on others may have this tenant paused; before that, when the turn has lasted its quantum and somebody of at least its
 * class waits. It comes back then by itself, in its turn again. Turns nest, and those of a tenant's processes and threads are one turn,
 * which ends with the last of them; one that dies ends its own. Errors are as of sublet_switch_tenant; there is no turn then. */
int sublet_turn_begin(uint32_t wait_ms);
/* SUBLET_ERROR_ARGUMENT when no turn of this process has begun. Does not block. */
int sublet_turn_end(void);

/* While the calling thread waits for a turn or for another's to end (sublet_turn_begin, sublet_switch_tenant, sublet_resume_in_turn), it asks
 * is_called_off with `context`, a few times a second, and holds no lock then. Any answer but 0 ends the wait, and the call fails with
 * SUBLET_ERROR_RETRY: nothing has changed. NULL: nobody is asked. */
typedef int (*sublet_is_called_off)(void *context);
int sublet_ask_while_waiting(sublet_is_called_off is_called_off, void *context);

/* Has every process of a tenant bring in, while it runs, the host memory that its next pause takes; NULL is the
 * caller's own tenant. Returns when all is there or will not be, and after wait_ms in any case: what is missing
 * then comes in afterwards. sublet_last_report_json says how far each process is, and what touching and pinning
 * took; its "outcome" is "completed" when all is there, else "partial". */
int sublet_prepare_tenant(const char *tenant, uint32_t wait_ms);

/* How much GPU memory a tenant may hold from now on, all its processes together; NULL is the caller's own tenant, which must have a process with
 * device memory. budgets is what `sublet budget` takes, joined by commas: "40GiB" of every GPU, "0=40GiB" of the one that nvidia-smi
 * shows as 0, "0=none" or "none" to take it back. It counts immediately. Less than is held takes nothing away: new allocations fail as if
 * memory were used up until it fits. sublet_last_report_json is what sublet_budget_json writes, with "outcome": "completed" when all
 * processes count what they hold, else "partial". SUBLET_ERROR_ARGUMENT when the text is no budget or there is no such tenant. */
int sublet_set_budget(const char *tenant, const char *budgets);
/* JSON: what a tenant may hold and holds, as {"tenant", "budgets" (as they were given; "" for none), "gpus" (that its processes see, each with
 * "gpu", "index", "budget_bytes" or null, "held_bytes" and "total_bytes"), "failures" (processes that do not count)}. NULL is the caller's
 * own tenant. */
int64_t sublet_budget_json(const char *tenant, char *buffer, size_t size);

/* Gives the memory of regions with these tags back. The caller's own tenant runs on; another stands still as in a whole
 * pause, unless it has agreed to run without them (SUBLET_RUNS_WITHOUT). Where processes run on, copies and fills of that
 * memory answer CUDA_ERROR_NOT_PERMITTED until sublet_resume_tags has brought it back, and a kernel that touches it ends
 * the context. tags[0..count); NULL and 0 are all tags. whose is one
 * of SUBLET_WHOSE_; with SUBLET_WHOSE_PROCESS the tenant is the caller's own, and the other processes are not
 * stopped unless they have imported such memory. What is away already stays so, and what is there stays
 * there. A tenant that is paused as a whole runs again after sublet_resume_tags with these tags and with all
 * memory that has none; a tenant that runs takes all its tags back with sublet_resume_tenant. */
int sublet_pause_tags(const char *tenant, const char *const *tags, size_t count, int whose,
                      uint32_t timeout_ms);
int sublet_resume_tags(const char *tenant, const char *const *tags, size_t count, int whose,
                       uint32_t timeout_ms);

/* Is the calling process's memory given back now, as a whole? 1 yes, 0 no. */
int sublet_is_paused(void);
/* Is any memory of the calling process with this tag away? 1 yes, 0 no, -1 no such tag. */
int sublet_tag_is_paused(const char *tag);
/* A number that grows with each step of a pause or resume of the calling process; 0 while it holds no device memory. As
 * long as it is the same, a tag whose memory was all there is not away. Costs a lock that is held for an instant. */
uint64_t sublet_changes(void);

/* Device memory that this thread asks for until the matching sublet_region_end belongs to `tag` (1 to 128
 * bytes of UTF-8) and is treated as `contents` (SUBLET_CONTENTS_) says: one policy for a tag as long as the
 * process lives. Regions nest; the innermost counts. Memory that NCCL, cuBLAS and the like ask for themselves
 * belongs to no tag. */
int sublet_region_begin(const char *tag, int contents);
/* The same for memory on one device (a CUDA ordinal; -1 is every device): on others it belongs to no tag. */
int sublet_region_begin_on(const char *tag, int contents, int device);
/* Until the matching sublet_region_end, memory that this thread asks for belongs to no tag. */
int sublet_region_begin_none(void);
int sublet_region_end(void);
/* For threads that have no region of their own open, such as those a library runs work on. One at a time. */
int sublet_region_begin_all_threads(const char *tag, int contents, int device);
int sublet_region_end_all_threads(void);

/* Where this process's contents of SUBLET_CONTENTS_FILE are saved: an existing directory that it can write. Without
 * this call it is SUBLET_FILE_DIR of the environment, else /tmp. Holds from the next pause on that finds no such
 * contents saved already. The file has no name, and is gone when the process ends, however that is. */
int sublet_set_file_dir(const char *path);

/* Where the saved contents of device memory [address, address + size_bytes) lie on the host while it is away.
 * Good until its resume begins, to be read only, and not by a forked child, where nothing lies there. Fails when the memory
 * is not away, when its contents were not kept in host memory, and when they lie in two pieces
 * or hold 64 KiB of zeros, which lie nowhere: sublet_host_copy_out copies them then, and also out of a file. */
int sublet_host_copy(uint64_t address, uint64_t size_bytes, const void **host);
int sublet_host_copy_out(uint64_t address, uint64_t size_bytes, void *target);

/* In each pause of the calling process, also one from outside, `source` is called with `context` and a token
 * when nothing of the application's can reach a device any more. It runs on a thread of its own and may answer
 * with sublet_unused, once: ranges of this process's memory whose contents nobody needs, which are then not
 * saved. The pause waits 250 ms for it; an answer that comes later is refused. NULL: nobody is asked. */
typedef void (*sublet_unused_source)(void *context, uint64_t token);
int sublet_set_unused_source(sublet_unused_source source, void *context);
int sublet_unused(uint64_t token, const uint64_t *starts, const uint64_t *sizes, size_t count);

/* Larger than memory: addresses whose contents are on the device by turns, while the process runs. A pager is a window of
 * addresses on one device, in chunks, of which at most frames_bytes are on the device, and with UINT64_MAX as many as the device and the
 * budget give, less 1 GiB; the rest lies in host memory. If other memory of the process finds no room, frames are given up. Each launch,
 * copy and fill that names an address of a span (what sublet_page_alloc gave) waits until all of the span is on the device. Kernels'
 * parameters are compared, also inside of structures; addresses that lie in device memory are not seen. What touches the addresses unseen
 * is an illegal access while they are away. A call that needs more than there are frames fails for want of memory. What was used in the
 * same order before comes ahead of its use. It needs a driver for CUDA 12.4 or newer.
 *
 * sublet_page_announce is a hint that spans are used next: they come while the device works, in this order. sublet_page_acquire waits for
 * at most timeout_ms of the time that the process is not paused, until spans are mapped, and they stay until sublet_page_release: for
 * work that is not seen, which has ended by then, and for questions to the driver about their addresses.
 * sublet_page_flush waits until the host has all that was written by uses that have ended.
 * Errors:
 * SUBLET_ERROR_ARGUMENT when chunks are of a size that the device does not allocate, when 0 bytes are wanted, and when more is used
 * together than fits (each text says what works), SUBLET_ERROR_RETRY when it
 * took too long, SUBLET_ERROR_OUT_OF_DEVICE_MEMORY and SUBLET_ERROR_OUT_OF_HOST_MEMORY when there is no memory for a frame, or for contents. */
int sublet_page_open(int device, uint64_t window_bytes, uint64_t chunk_bytes, uint64_t frames_bytes, uint64_t *pager);
/* Gives all of its memory back when the last use is over. */
int sublet_page_close(uint64_t pager);
/* From now on memory of 1 MiB and more that cuMemAlloc gives to regions of this tag, on the pager's device, lies in the pager's window, whichever library
 * asks for it; cuMemFree gives it up. It takes no device memory before it is used. A tag has one pager a device. Such memory is
 * within reach of no other device and no other process, and belongs to no tag for a pause by tag. The pager cannot be
 * closed before it is freed. */
int sublet_page_region(uint64_t pager, const char *tag);
/* At a multiple of 512; neighbours may share a chunk. What is there first is not defined. Takes no device memory, and no host memory
 * before it is needed: SUBLET_ERROR_OUT_OF_HOST_MEMORY when copies of all that is paged would not fit within its limits. */
int sublet_page_alloc(uint64_t pager, uint64_t size_bytes, uint64_t *span);
int sublet_page_free(uint64_t pager, uint64_t span);
int sublet_page_acquire(uint64_t pager, const uint64_t *spans, size_t count, uint32_t timeout_ms);
int sublet_page_release(uint64_t pager, const uint64_t *spans, size_t count);
int sublet_page_announce(uint64_t pager, const uint64_t *spans, size_t count);
int sublet_page_flush(uint64_t pager, uint32_t timeout_ms);
/* From now on at most so much is on the device. */
int sublet_page_set_frames(uint64_t pager, uint64_t frames_bytes, uint32_t timeout_ms);
/* JSON: a list of what a step would bring with other frames, each "frames_bytes" and "in_bytes", by the order of the last step and
 * the best choice of what leaves. Empty as long as no step was like the one before. */
int64_t sublet_page_plan_json(uint64_t pager, char *buffer, size_t size);
/* JSON: "chunk_bytes", "paged_bytes", "frames_bytes", "resident_bytes", "stays_bytes", and so far "out_bytes", "in_bytes", "unchanged_bytes"
 * (that needed no copy out), "exchanges", "hits" and "misses" (uses that found all of their memory on the device, and that did not), "calls"
 * (that were seen), "waited_us" (by these), "remaps" (chunks that were given device memory) and "remap_us" (the driver's time for them).
 * "unseen" are writes that no call has shown, if SUBLET_PAGING_CHECK=1: each "address", "size_bytes", "span" and "span_bytes" (its
 * allocation), "chunk", "after_use" and "before_use". "chunks" has a letter for each chunk, in the
 * order of addresses: a away, i on its way in, h on the device and the same in host memory, w on the device and written since it was copied
 * to the host, o on its way out, - of no span. */
int64_t sublet_page_json(uint64_t pager, char *buffer, size_t size);

/* For torch's CUDAPluggableAllocator. What sublet_torch_malloc gives can be paused whatever its size, lies on
 * `device` whichever is current, and belongs to the region of the calling thread; NULL when size is not positive
 * or there is no memory. sublet_torch_free waits for the device's work first. `stream` is not used. */
void *sublet_torch_malloc(ptrdiff_t size, int device, void *stream);
void sublet_torch_free(void *ptr, ptrdiff_t size, int device, void *stream);

/* JSON: what this process holds (-1 when it is not under Sublet), what every process of a tenant holds, and
 * the names of the tenants there are. */
int64_t sublet_stats_json(char *buffer, size_t size);
int64_t sublet_tenant_stats_json(const char *tenant, char *buffer, size_t size);
int64_t sublet_tenants_json(char *buffer, size_t size);

/* The pause family of AMem NCCL. Results are ncclResult_t: 0 is ncclSuccess, 1 ncclUnhandledCudaError,
 * 4 ncclInvalidArgument, 5 ncclInvalidUsage.
 *
 * ncclPause and ncclResume are called by every process of the tenant; the argument is ignored. They
 * return when it has happened everywhere, and immediately if it had happened before. */
int ncclPause(void *comm);
int ncclResume(void *comm);
/* Prints this process's device memory to standard output: one line per class, then the total. */
int ncclMemStats(void);
/* The group that this process belongs to, when no tenant is named; fixed before the first device memory,
 * after which setting returns ncclUnhandledCudaError. */
int ncclSetGroupID(int id);
int ncclGetGroupID(int *id);

/* The family that this process names, instead of SUBLET_FAMILY: tenants that name the same one may open each other's
 * device memory, by cudaIpc handles and by descriptors of cuMemExportToShareableHandle. Best before the first use of CUDA:
 * SUBLET_ERROR_ARGUMENT when the process has joined its tenant with another family or none, or the name is none. */
int sublet_set_family(const char *family);

/* Brings a process that was not started with `sublet run` or LD_PRELOAD under Sublet, for one that has opened
 * libsublet.so itself: the libraries that are loaded, and those loaded later, call Sublet's functions from
 * here on. Best before the first use of CUDA: memory allocated earlier stays on the device at a pause.
 * `tenant` is the tenant to join at the first device memory; NULL is the one that the environment names.
 * SUBLET_ERROR_ARGUMENT when another one has been joined, SUBLET_ERROR_REFUSED in a child that an attached
 * process has forked. Attaching twice, or under LD_PRELOAD, is a success. */
int sublet_attach(const char *tenant);

/* What the attach found and did, as sublet_stats_json writes it:
 *   {"tenant": "train" or null,
 *    "libraries": [{"path": "...", "slots": imports that lead to Sublet, "exchanged": addresses of the
 *      driver's functions that it had kept and that were exchanged, "state": "hooked", "late" or "unknown",
 *      "why": "..."}],
 *    "devices": [{"device": 0, "used_bytes": in use by all processes when the attach found a context there}],
 *    "launches_are_held": is every library hooked, so that a pause holds all launches} */
int64_t sublet_attach_report_json(char *buffer, size_t size);

#ifdef __cplusplus
}
#endif

#endif
