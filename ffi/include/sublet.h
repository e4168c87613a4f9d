/* sublet.h: the C interface of libsublet.so.
 *
 * Every function may be called from any thread. Functions that pause or resume block until it has
 * happened or failed; all others return at once. Unless it says otherwise, a function returns 0 for
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

/* What a pause does with the contents of a region's memory. */
#define SUBLET_CONTENTS_KEEP 0
#define SUBLET_CONTENTS_DISCARD 1

/* The version of the library, such as "0.1.0". Never freed. */
const char *sublet_version(void);

/* Why the last call of this thread failed, as one line; empty when none has. Valid until the next call of
 * this interface on this thread. */
const char *sublet_last_error(void);

/* Pauses every process of a tenant on behalf of all of them; NULL is the caller's own. A tenant that is
 * paused already is a success. timeout_ms bounds each phase; 0 keeps the defaults. */
int sublet_pause_tenant(const char *tenant, uint32_t timeout_ms);

/* Resumes every process of a tenant; as sublet_pause_tenant. */
int sublet_resume_tenant(const char *tenant, uint32_t timeout_ms);

/* Is the calling process's memory given back now? 1 yes, 0 no. */
int sublet_is_paused(void);

/* Device memory that this thread asks for until the matching sublet_region_end belongs to `tag` (1 to 128
 * bytes of UTF-8) and is treated as `contents` (SUBLET_CONTENTS_) says. Regions nest; the innermost
 * counts. NCCL's own memory is kept whatever region it is asked for in. */
int sublet_region_begin(const char *tag, int contents);
int sublet_region_end(void);

/* Writes what this process holds, as JSON with a terminating zero, to buffer[0..size). Returns the length
 * that the whole text has without the zero; when that is not less than size, nothing was written.
 * Returns -1 when this process is not under Sublet. buffer may be NULL when size is 0. */
int64_t sublet_stats_json(char *buffer, size_t size);

/* The pause family of AMem NCCL. Results are ncclResult_t: 0 is ncclSuccess, 1 ncclUnhandledCudaError,
 * 4 ncclInvalidArgument, 5 ncclInvalidUsage.
 *
 * ncclPause and ncclResume are called by every process of the tenant; the argument is ignored. They
 * return when it has happened everywhere, and at once when it had happened before. */
int ncclPause(void *comm);
int ncclResume(void *comm);
/* Prints this process's device memory to standard output: one line per class, then the total. */
int ncclMemStats(void);
/* The group that this process belongs to, when no tenant is named; fixed before the first device memory,
 * after which setting returns ncclUnhandledCudaError. */
int ncclSetGroupID(int id);
int ncclGetGroupID(int *id);

#ifdef __cplusplus
}
#endif

#endif
