//! The methods of [`Library`]: one for each function of the header that the package uses.
//!
//! Texts that come back are JSON. A method that pauses, resumes or asks other processes lets go of the
//! interpreter lock, so other threads of the program run on.
//!
//! A method that is given a list adds what it has done to it before Python handles a signal: the caller undoes that if the handler raises.

#![expect(unsafe_code, reason = "calls what the header of libsublet.so declares")]

use std::error::Error as _;
use std::ffi::{CString, c_int};
use std::path::PathBuf;
use std::ptr;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::acting::{array, c_texts, noted, pointer, pointers};
use crate::library::{Library, c_text};
use crate::unused::{self, Ask, Source};

/// Finds `name` in the library, or returns the exception that says that it is missing.
macro_rules! function {
    ($library:expr, $py:expr, $name:ident) => {
        $library.function($py, stringify!($name), $library.functions().$name)?
    };
}

#[pymethods]
impl Library {
    /// The library that this process was started with, or None.
    #[staticmethod]
    fn find() -> Option<Self> {
        Self::preloaded()
    }

    /// Opens the library at `path`, for its functions alone: it stands in for nobody until `attach`.
    #[staticmethod]
    fn open(path: PathBuf) -> PyResult<Self> {
        Self::opened(path).map_err(|error| {
            // The loader's own words, which name the file, are the cause.
            let cause = error.source().map_or_else(String::new, |cause| format!(": {cause}"));
            PyOSError::new_err(format!("{error}{cause}"))
        })
    }

    /// The library's version.
    fn version(&self) -> String {
        self.version_text()
    }

    /// Names the family of this process.
    fn set_family(&self, py: Python<'_>, family: &str) -> PyResult<()> {
        let set = function!(self, py, sublet_set_family);
        let family = c_text(Some(family))?;
        self.run(py, "attach", || {
            // SAFETY: a terminated string that outlives the call.
            unsafe { set(pointer(family.as_ref())) }
        })
    }

    /// Joins this process to a tenant, and returns what came too late for it.
    fn attach(&self, py: Python<'_>, tenant: Option<&str>) -> PyResult<String> {
        let attach = function!(self, py, sublet_attach);
        let report = function!(self, py, sublet_attach_report_json);
        let tenant = c_text(tenant)?;
        self.run(py, "attach", || {
            // SAFETY: null or a terminated string that outlives the call.
            unsafe { attach(pointer(tenant.as_ref())) }
        })?;
        self.answer(py, "attach", &|buffer, size| {
            // SAFETY: the buffer has `size` bytes.
            unsafe { report(buffer, size) }
        })
    }

    /// Pauses all processes of a tenant.
    #[pyo3(signature = (tenant, timeout_ms, done=None))]
    fn pause_tenant(
        &self,
        py: Python<'_>,
        tenant: Option<&str>,
        timeout_ms: u32,
        done: Option<&Bound<'_, PyList>>,
    ) -> PyResult<String> {
        let pause = function!(self, py, sublet_pause_tenant);
        noted(done, self.act_on_tenant(py, "pause", pause, tenant, timeout_ms))
    }

    /// Resumes all processes of a tenant.
    fn resume_tenant(
        &self,
        py: Python<'_>,
        tenant: Option<&str>,
        timeout_ms: u32,
    ) -> PyResult<String> {
        let resume = function!(self, py, sublet_resume_tenant);
        self.act_on_tenant(py, "resume", resume, tenant, timeout_ms)
    }

    /// Pauses the memory of tags.
    #[pyo3(signature = (tenant, tags, whose, timeout_ms, done=None))]
    fn pause_tags(
        &self,
        py: Python<'_>,
        tenant: Option<&str>,
        tags: Vec<String>,
        whose: c_int,
        timeout_ms: u32,
        done: Option<&Bound<'_, PyList>>,
    ) -> PyResult<String> {
        let pause = function!(self, py, sublet_pause_tags);
        noted(done, self.act_on_tags(py, "pause", pause, tenant, tags, whose, timeout_ms))
    }

    /// Resumes the memory of tags; of all tags when there are none.
    fn resume_tags(
        &self,
        py: Python<'_>,
        tenant: Option<&str>,
        tags: Vec<String>,
        whose: c_int,
        timeout_ms: u32,
    ) -> PyResult<String> {
        let resume = function!(self, py, sublet_resume_tags);
        self.act_on_tags(py, "resume", resume, tenant, tags, whose, timeout_ms)
    }

    /// Pauses the tenant once every process of it has called this.
    #[pyo3(signature = (done=None))]
    fn pause_together(&self, py: Python<'_>, done: Option<&Bound<'_, PyList>>) -> PyResult<String> {
        let pause = function!(self, py, ncclPause);
        let paused = self.reported(py, "pause", || {
            // SAFETY: the argument is ignored.
            unsafe { pause(ptr::null_mut()) }
        });
        noted(done, paused)
    }

    /// Resumes the tenant once every process of it has called this.
    fn resume_together(&self, py: Python<'_>) -> PyResult<String> {
        let resume = function!(self, py, ncclResume);
        self.reported(py, "resume", || {
            // SAFETY: the argument is ignored.
            unsafe { resume(ptr::null_mut()) }
        })
    }

    /// Pauses one tenant and resumes another.
    fn swap_tenants(
        &self,
        py: Python<'_>,
        from_tenant: &str,
        to_tenant: &str,
        timeout_ms: u32,
    ) -> PyResult<String> {
        let swap = function!(self, py, sublet_swap_tenants);
        let from = CString::new(from_tenant)?;
        let to = CString::new(to_tenant)?;
        self.reported(py, "swap", || {
            // SAFETY: both are terminated strings that outlive the call.
            unsafe { swap(from.as_ptr(), to.as_ptr(), timeout_ms) }
        })
    }

    /// Pauses tags of one tenant and resumes tags of another; all of it where there are none.
    fn swap_tags(
        &self,
        py: Python<'_>,
        from_tenant: &str,
        out_tags: Vec<String>,
        to_tenant: &str,
        in_tags: Vec<String>,
        timeout_ms: u32,
    ) -> PyResult<String> {
        let swap = function!(self, py, sublet_swap_tags);
        let from = CString::new(from_tenant)?;
        let to = CString::new(to_tenant)?;
        let (out, back) = (c_texts(out_tags)?, c_texts(in_tags)?);
        self.reported(py, "swap", || {
            let (out, back) = (pointers(&out), pointers(&back));
            // SAFETY: names and tags are terminated strings that outlive the call, and null stands for no tags.
            unsafe {
                swap(
                    from.as_ptr(),
                    array(&out),
                    out.len(),
                    to.as_ptr(),
                    array(&back),
                    back.len(),
                    timeout_ms,
                )
            }
        })
    }

    /// Resumes a tenant in its place among those that wait for the GPUs.
    fn resume_in_turn(&self, py: Python<'_>, tenant: &str, wait_ms: u32) -> PyResult<String> {
        let resume = function!(self, py, sublet_resume_in_turn);
        self.waiting(py, || self.act_on_tenant(py, "resume", resume, Some(tenant), wait_ms))
    }

    /// Has a tenant get its GPUs.
    fn switch_tenant(&self, py: Python<'_>, tenant: &str, wait_ms: u32) -> PyResult<String> {
        let switch = function!(self, py, sublet_switch_tenant);
        self.waiting(py, || self.act_on_tenant(py, "switch", switch, Some(tenant), wait_ms))
    }

    /// Begins a turn of this process.
    #[pyo3(signature = (wait_ms, begun=None))]
    fn turn_begin(
        &self,
        py: Python<'_>,
        wait_ms: u32,
        begun: Option<&Bound<'_, PyList>>,
    ) -> PyResult<String> {
        let begin = function!(self, py, sublet_turn_begin);
        self.waiting(py, || {
            // SAFETY: the function has no precondition.
            noted(begun, self.reported(py, "turn", || unsafe { begin(wait_ms) }))
        })
    }

    /// Ends the turn of this process that began last.
    fn turn_end(&self, py: Python<'_>) -> PyResult<()> {
        self.simply(py, "turn", function!(self, py, sublet_turn_end))
    }

    /// Brings host memory in ahead of a tenant's next pause.
    fn prepare_tenant(&self, py: Python<'_>, tenant: &str, wait_ms: u32) -> PyResult<String> {
        let prepare = function!(self, py, sublet_prepare_tenant);
        self.act_on_tenant(py, "prepare", prepare, Some(tenant), wait_ms)
    }

    /// Changes how much GPU memory a tenant may hold.
    fn set_budget(&self, py: Python<'_>, tenant: Option<&str>, budgets: &str) -> PyResult<String> {
        let set = function!(self, py, sublet_set_budget);
        let tenant = c_text(tenant)?;
        let budgets = CString::new(budgets)?;
        self.reported(py, "budget", || {
            // SAFETY: null or a terminated string, and one, which both outlive the call.
            unsafe { set(pointer(tenant.as_ref()), budgets.as_ptr()) }
        })
    }

    /// What a tenant may hold, and holds.
    fn budget(&self, py: Python<'_>, tenant: Option<&str>) -> PyResult<String> {
        let budget = function!(self, py, sublet_budget_json);
        let tenant = c_text(tenant)?;
        self.answer(py, "budget", &|buffer, size| {
            // SAFETY: null or a terminated string, and a buffer of `size` bytes.
            unsafe { budget(pointer(tenant.as_ref()), buffer, size) }
        })
    }

    /// Is this process paused as a whole?
    fn is_paused(&self, py: Python<'_>) -> PyResult<bool> {
        let is_paused = function!(self, py, sublet_is_paused);
        // SAFETY: the function has no precondition.
        Ok(unsafe { is_paused() } == 1)
    }

    /// Is some of a tag's memory away? None for an unknown tag.
    fn tag_is_paused(&self, py: Python<'_>, tag: &str) -> PyResult<Option<bool>> {
        let is_paused = function!(self, py, sublet_tag_is_paused);
        let tag = CString::new(tag)?;
        // SAFETY: a terminated string that outlives the call.
        Ok(match unsafe { is_paused(tag.as_ptr()) } {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        })
    }

    /// A number that grows with each step of a pause or resume of this process.
    fn changes(&self, py: Python<'_>) -> PyResult<u64> {
        let changes = function!(self, py, sublet_changes);
        // SAFETY: the function has no precondition.
        Ok(unsafe { changes() })
    }

    /// Begins a region of this thread; of every device when there is none.
    #[pyo3(signature = (tag, contents, device, begun=None))]
    fn region_begin(
        &self,
        py: Python<'_>,
        tag: &str,
        contents: c_int,
        device: Option<c_int>,
        begun: Option<&Bound<'_, PyList>>,
    ) -> PyResult<()> {
        let begin = function!(self, py, sublet_region_begin_on);
        self.begin_region(py, begin, tag, contents, device, begun)
    }

    /// Ends the innermost region of this thread.
    fn region_end(&self, py: Python<'_>) -> PyResult<()> {
        self.simply(py, "region", function!(self, py, sublet_region_end))
    }

    /// Begins a stretch in which memory of this thread belongs to no tag; `region_end` ends it.
    fn region_begin_none(&self, py: Python<'_>) -> PyResult<()> {
        self.simply(py, "region", function!(self, py, sublet_region_begin_none))
    }

    /// Begins the region of threads that have none of their own.
    #[pyo3(signature = (tag, contents, device, begun=None))]
    fn region_begin_all_threads(
        &self,
        py: Python<'_>,
        tag: &str,
        contents: c_int,
        device: Option<c_int>,
        begun: Option<&Bound<'_, PyList>>,
    ) -> PyResult<()> {
        let begin = function!(self, py, sublet_region_begin_all_threads);
        self.begin_region(py, begin, tag, contents, device, begun)
    }

    /// Ends the region of threads that have none of their own.
    fn region_end_all_threads(&self, py: Python<'_>) -> PyResult<()> {
        self.simply(py, "region", function!(self, py, sublet_region_end_all_threads))
    }

    /// What this process holds.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        let stats = function!(self, py, sublet_stats_json);
        self.answer(py, "stats", &|buffer, size| {
            // SAFETY: the buffer has `size` bytes.
            unsafe { stats(buffer, size) }
        })
    }

    /// What all processes of a tenant hold.
    fn tenant_stats(&self, py: Python<'_>, tenant: Option<&str>) -> PyResult<String> {
        let stats = function!(self, py, sublet_tenant_stats_json);
        let tenant = c_text(tenant)?;
        self.answer(py, "stats", &|buffer, size| {
            // SAFETY: null or a terminated string, and a buffer of `size` bytes.
            unsafe { stats(pointer(tenant.as_ref()), buffer, size) }
        })
    }

    /// The names of all tenants.
    fn tenants(&self, py: Python<'_>) -> PyResult<String> {
        let tenants = function!(self, py, sublet_tenants_json);
        self.answer(py, "tenants", &|buffer, size| {
            // SAFETY: the buffer has `size` bytes.
            unsafe { tenants(buffer, size) }
        })
    }

    /// The host address of the saved bytes of paused device memory.
    fn host_copy(&self, py: Python<'_>, address: u64, size_bytes: u64) -> PyResult<usize> {
        let find = function!(self, py, sublet_host_copy);
        let mut place = 0_usize;
        let found = &mut place;
        self.run(py, "host_copy", || {
            let mut host = ptr::null();
            // SAFETY: `host` is a place for one pointer, and outlives the call.
            let code = unsafe { find(address, size_bytes, &raw mut host) };
            *found = host.addr();
            code
        })?;
        Ok(place)
    }

    /// Names the folder for contents that are saved to a file.
    fn set_file_dir(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let set = function!(self, py, sublet_set_file_dir);
        let path = CString::new(path.into_os_string().into_encoded_bytes())?;
        self.run(py, "set_file_dir", || {
            // SAFETY: a terminated string that outlives the call.
            unsafe { set(path.as_ptr()) }
        })
    }

    /// A copy of the saved bytes of paused device memory.
    fn host_copy_out(&self, py: Python<'_>, address: u64, size_bytes: usize) -> PyResult<Vec<u8>> {
        let copy = function!(self, py, sublet_host_copy_out);
        let mut bytes = vec![0_u8; size_bytes];
        let target = &mut bytes;
        self.run(py, "host_copy", || {
            // SAFETY: the buffer has `size_bytes` bytes.
            unsafe { copy(address, size_bytes as u64, target.as_mut_ptr().cast()) }
        })?;
        Ok(bytes)
    }

    /// Opens a window for memory that is on a device by turns; its number.
    fn page_open(
        &self,
        py: Python<'_>,
        device: c_int,
        window_bytes: u64,
        chunk_bytes: u64,
        frames_bytes: u64,
    ) -> PyResult<u64> {
        let open = function!(self, py, sublet_page_open);
        let mut pager = 0_u64;
        let place = &mut pager;
        self.run(py, "paged", || {
            // SAFETY: a place for one number, which outlives the call.
            unsafe { open(device, window_bytes, chunk_bytes, frames_bytes, place) }
        })?;
        Ok(pager)
    }

    /// Gives a window back.
    fn page_close(&self, py: Python<'_>, pager: u64) -> PyResult<()> {
        let close = function!(self, py, sublet_page_close);
        // SAFETY: no pointer is passed.
        self.run(py, "paged", || unsafe { close(pager) })
    }

    /// Addresses in a window.
    fn page_alloc(&self, py: Python<'_>, pager: u64, size_bytes: u64) -> PyResult<u64> {
        let alloc = function!(self, py, sublet_page_alloc);
        let mut span = 0_u64;
        let place = &mut span;
        self.run(py, "paged", || {
            // SAFETY: a place for one address, which outlives the call.
            unsafe { alloc(pager, size_bytes, place) }
        })?;
        Ok(span)
    }

    /// Has uses seen at launches from now on.
    fn page_look(&self, py: Python<'_>, pager: u64) -> PyResult<()> {
        let look = function!(self, py, sublet_page_look);
        // SAFETY: no pointer is passed.
        self.run(py, "paged", || unsafe { look(pager) })
    }

    /// Has memory of regions of a tag lie in a window.
    fn page_region(&self, py: Python<'_>, pager: u64, tag: &str) -> PyResult<()> {
        let page = function!(self, py, sublet_page_region);
        let tag = CString::new(tag)?;
        // SAFETY: a terminated string, which outlives the call.
        self.run(py, "region", || unsafe { page(pager, tag.as_ptr()) })
    }

    /// Gives addresses up.
    fn page_free(&self, py: Python<'_>, pager: u64, span: u64) -> PyResult<()> {
        let free = function!(self, py, sublet_page_free);
        // SAFETY: no pointer is passed.
        self.run(py, "paged", || unsafe { free(pager, span) })
    }

    /// Begins a use.
    fn page_acquire(
        &self,
        py: Python<'_>,
        pager: u64,
        spans: Vec<u64>,
        stream: u64,
        timeout_ms: u32,
    ) -> PyResult<()> {
        let acquire = function!(self, py, sublet_page_acquire);
        self.run(py, "paged", move || {
            // SAFETY: as many addresses as are said, which outlive the call.
            unsafe { acquire(pager, spans.as_ptr(), spans.len(), stream, timeout_ms) }
        })
    }

    /// Ends a use.
    fn page_release(
        &self,
        py: Python<'_>,
        pager: u64,
        spans: Vec<u64>,
        stream: u64,
        has_written: bool,
    ) -> PyResult<()> {
        let release = function!(self, py, sublet_page_release);
        self.run(py, "paged", move || {
            // SAFETY: as above.
            unsafe { release(pager, spans.as_ptr(), spans.len(), stream, has_written.into()) }
        })
    }

    /// Says how much of a window may be on the device.
    fn page_set_frames(
        &self,
        py: Python<'_>,
        pager: u64,
        frames_bytes: u64,
        timeout_ms: u32,
    ) -> PyResult<()> {
        let set = function!(self, py, sublet_page_set_frames);
        // SAFETY: no pointer is passed.
        self.run(py, "set_frames", || unsafe { set(pager, frames_bytes, timeout_ms) })
    }

    /// Says what is used next.
    fn page_announce(&self, py: Python<'_>, pager: u64, spans: Vec<u64>) -> PyResult<()> {
        let announce = function!(self, py, sublet_page_announce);
        self.run(py, "paged", move || {
            // SAFETY: as above.
            unsafe { announce(pager, spans.as_ptr(), spans.len()) }
        })
    }

    /// What a step would bring to a window with other frames.
    fn page_plan(&self, py: Python<'_>, pager: u64) -> PyResult<String> {
        let write = function!(self, py, sublet_page_plan_json);
        self.answer(py, "plan", &|buffer, size| {
            // SAFETY: the buffer has `size` bytes.
            unsafe { write(pager, buffer, size) }
        })
    }

    /// What a window holds and has done.
    fn page_report(&self, py: Python<'_>, pager: u64) -> PyResult<String> {
        let write = function!(self, py, sublet_page_json);
        self.answer(py, "report", &|buffer, size| {
            // SAFETY: the buffer has `size` bytes.
            unsafe { write(pager, buffer, size) }
        })
    }

    /// Has `source` asked in each pause, also one from outside, for memory whose contents nobody needs: a list of
    /// addresses and bytes. `None`: nobody is asked.
    fn set_unused_source(&self, py: Python<'_>, source: Option<Py<PyAny>>) -> PyResult<()> {
        let set = function!(self, py, sublet_set_unused_source);
        let answer = function!(self, py, sublet_unused);
        let source = source.map(|function| Source::leaked(function, answer));
        self.run(py, "unused", || {
            let context = source.map_or(ptr::null(), ptr::from_ref).cast_mut().cast();
            // SAFETY: `ask` takes any thread, and this context as long as the process lives.
            unsafe { set(source.map(|_| unused::ask as Ask), context) }
        })
    }
}
