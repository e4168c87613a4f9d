//! The methods of [`Library`]: one for each function of the header that the package uses. Commands all go through one.
//!
//! Texts that come back are JSON. A method that pauses, resumes or asks other processes lets go of the
//! interpreter lock, so other threads of the program run on.
//!
//! A method that is given a list adds what it has done to it before Python handles a signal: the caller undoes that if the handler raises.

#![expect(unsafe_code, reason = "calls what the header of libsublet.so declares")]

use std::ffi::{CString, c_int};
use std::path::PathBuf;
use std::ptr;

use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::library::{Library, answer, call, function, noted};
use crate::unused::{self, Ask, Source};

#[pymethods]
impl Library {
    /// The library that this process was started with, or None.
    #[staticmethod]
    fn find() -> Option<Self> {
        Self::preloaded()
    }

    /// Opens the library at `path` for its functions alone: it replaces no other functions until `attach`.
    #[staticmethod]
    fn open(path: PathBuf) -> PyResult<Self> {
        Self::opened(path)
    }

    /// The library's version.
    fn version(&self) -> String {
        self.version_text()
    }

    /// Sets the family of this process.
    fn set_family(&self, py: Python<'_>, family: &str) -> PyResult<()> {
        let family = CString::new(family)?;
        call!(self, py, "attach", sublet_set_family(family.as_ptr()))
    }

    /// Attaches this process to a tenant, and returns the report of the attach.
    fn attach(&self, py: Python<'_>, tenant: Option<&str>) -> PyResult<String> {
        let tenant = tenant.map(CString::new).transpose()?;
        let name = || tenant.as_ref().map_or(ptr::null(), |tenant| tenant.as_ptr());
        call!(self, py, "attach", sublet_attach(name()))?;
        answer!(self, py, "attach", sublet_attach_report_json())
    }

    /// Does what a command in JSON says, which is a `what`. Its wait for a turn ends when the handler of a signal raises.
    #[pyo3(signature = (what, json, done=None))]
    fn command(
        &self,
        py: Python<'_>,
        what: &str,
        json: &str,
        done: Option<&Bound<'_, PyList>>,
    ) -> PyResult<String> {
        let command = function!(self, py, sublet_command);
        let json = CString::new(json)?;
        // SAFETY: a terminated string that outlives the call.
        let act = || unsafe { command(json.as_ptr()) };
        self.waiting(py, || noted(done, self.reported(py, what, act)))
    }

    /// Ends the turn of this process that began last.
    fn turn_end(&self, py: Python<'_>) -> PyResult<()> {
        call!(self, py, "turn", sublet_turn_end())
    }

    /// Is this process paused as a whole?
    fn is_paused(&self, py: Python<'_>) -> PyResult<bool> {
        let is_paused = function!(self, py, sublet_is_paused);
        // SAFETY: the function has no precondition.
        Ok(unsafe { is_paused() } == 1)
    }

    /// Is any of a tag's memory paused? None for an unknown tag.
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

    /// Begins a region of this thread, or of threads that have none of their own; of every device when there is none.
    #[pyo3(signature = (tag, contents, device, begun=None, all_threads=false))]
    fn region_begin(
        slf: &Bound<'_, Self>,
        tag: &str,
        contents: c_int,
        device: Option<c_int>,
        begun: Option<&Bound<'_, PyList>>,
        all_threads: bool,
    ) -> PyResult<()> {
        let (slf, py) = (slf.borrow(), slf.py());
        let (c_tag, device) = (CString::new(tag)?, device.unwrap_or(-1));
        let done = if all_threads {
            call!(
                slf,
                py,
                "region",
                sublet_region_begin_all_threads(c_tag.as_ptr(), contents, device)
            )
        } else {
            call!(slf, py, "region", sublet_region_begin_on(c_tag.as_ptr(), contents, device))
        };
        noted(begun, done.map(|()| tag.to_owned())).map(drop)
    }

    /// Ends the innermost region of this thread.
    fn region_end(&self, py: Python<'_>) -> PyResult<()> {
        call!(self, py, "region", sublet_region_end())
    }

    /// Begins a stretch in which memory of this thread belongs to no tag; `region_end` ends it.
    fn region_begin_none(&self, py: Python<'_>) -> PyResult<()> {
        call!(self, py, "region", sublet_region_begin_none())
    }

    /// Ends the region of threads that have none of their own.
    fn region_end_all_threads(&self, py: Python<'_>) -> PyResult<()> {
        call!(self, py, "region", sublet_region_end_all_threads())
    }

    /// Returns what this process holds, as JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        answer!(self, py, "stats", sublet_stats_json())
    }

    /// Returns the host address of the saved bytes of paused device memory.
    fn host_copy(&self, py: Python<'_>, address: u64, size_bytes: u64) -> PyResult<usize> {
        let mut host = 0_usize;
        let place = &mut host;
        // A pointer is written there, of which the address is wanted.
        call!(
            self,
            py,
            "host_copy",
            sublet_host_copy(address, size_bytes, ptr::from_mut(place).cast())
        )?;
        Ok(host)
    }

    /// Sets the folder for contents that are saved to a file.
    fn set_file_dir(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let path = CString::new(path.into_os_string().into_encoded_bytes())?;
        call!(self, py, "set_file_dir", sublet_set_file_dir(path.as_ptr()))
    }

    /// Returns a copy of the saved bytes of paused device memory.
    fn host_copy_out(&self, py: Python<'_>, address: u64, size_bytes: usize) -> PyResult<Vec<u8>> {
        let mut bytes = vec![0_u8; size_bytes];
        let target = &mut bytes;
        call!(
            self,
            py,
            "host_copy",
            sublet_host_copy_out(address, size_bytes as u64, target.as_mut_ptr().cast())
        )?;
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
        let mut pager = 0_u64;
        let place = &mut pager;
        call!(
            self,
            py,
            "paged",
            sublet_page_open(device, window_bytes, chunk_bytes, frames_bytes, place)
        )?;
        Ok(pager)
    }

    /// Closes a window.
    fn page_close(&self, py: Python<'_>, pager: u64) -> PyResult<()> {
        call!(self, py, "paged", sublet_page_close(pager))
    }

    /// Addresses in a window.
    fn page_alloc(&self, py: Python<'_>, pager: u64, size_bytes: u64) -> PyResult<u64> {
        let mut span = 0_u64;
        let place = &mut span;
        call!(self, py, "paged", sublet_page_alloc(pager, size_bytes, place))?;
        Ok(span)
    }

    /// Has memory of regions of a tag lie in a window.
    fn page_region(&self, py: Python<'_>, pager: u64, tag: &str) -> PyResult<()> {
        let tag = CString::new(tag)?;
        call!(self, py, "region", sublet_page_region(pager, tag.as_ptr()))
    }

    /// Frees a span of addresses.
    fn page_free(&self, py: Python<'_>, pager: u64, span: u64) -> PyResult<()> {
        call!(self, py, "paged", sublet_page_free(pager, span))
    }

    /// Maps spans, and keeps them mapped.
    fn page_acquire(
        &self,
        py: Python<'_>,
        pager: u64,
        spans: Vec<u64>,
        timeout_ms: u32,
    ) -> PyResult<()> {
        call!(
            self,
            py,
            "paged",
            sublet_page_acquire(pager, spans.as_ptr(), spans.len(), timeout_ms)
        )
    }

    /// Releases spans: they may leave the device again.
    fn page_release(&self, py: Python<'_>, pager: u64, spans: Vec<u64>) -> PyResult<()> {
        call!(self, py, "paged", sublet_page_release(pager, spans.as_ptr(), spans.len()))
    }

    /// Sets how much of a window may be on the device.
    fn page_set_frames(
        &self,
        py: Python<'_>,
        pager: u64,
        frames_bytes: u64,
        timeout_ms: u32,
    ) -> PyResult<()> {
        call!(self, py, "set_frames", sublet_page_set_frames(pager, frames_bytes, timeout_ms))
    }

    /// Announces the spans that are used next.
    fn page_announce(&self, py: Python<'_>, pager: u64, spans: Vec<u64>) -> PyResult<()> {
        call!(self, py, "paged", sublet_page_announce(pager, spans.as_ptr(), spans.len()))
    }

    /// Returns what a step would bring to a window with other frames, as JSON.
    fn page_plan(&self, py: Python<'_>, pager: u64) -> PyResult<String> {
        answer!(self, py, "plan", sublet_page_plan_json(pager))
    }

    /// Returns what a window holds and has done, as JSON.
    fn page_report(&self, py: Python<'_>, pager: u64) -> PyResult<String> {
        answer!(self, py, "report", sublet_page_json(pager))
    }

    /// Has `source` asked in each pause, also one from outside, for memory whose contents nobody needs: a list of
    /// addresses and bytes. `None`: nobody is asked.
    fn set_unused_source(&self, py: Python<'_>, source: Option<Py<PyAny>>) -> PyResult<()> {
        let answer = function!(self, py, sublet_unused);
        let source = source.map(|function| Source::leaked(function, answer));
        // `ask` takes any thread, and its context as long as the process lives.
        let context = move || source.map_or(ptr::null(), ptr::from_ref).cast_mut().cast();
        let ask = source.map(|_| unused::ask as Ask);
        call!(self, py, "unused", sublet_set_unused_source(ask, context()))
    }
}
