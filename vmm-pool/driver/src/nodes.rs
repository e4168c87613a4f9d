//! On which NUMA nodes host memory lies.

#![expect(unsafe_code, reason = "the standard library has no call that places pages")]

use std::io;

/// Of the kernel's mask; no machine has more.
const NODES_MAX: usize = 1024;
const WORD_BITS: usize = usize::BITS as usize;

/// Has pages of a map at `start` that come in later lie on `nodes`. One is preferred, so that a full one is no error; several take
/// turns. With none it does nothing.
///
/// # Errors
/// The error of the kernel: it refuses addresses at which nothing is mapped, and nodes that it does not know.
pub fn place(start: usize, size_bytes: usize, nodes: &[u32]) -> io::Result<()> {
    if nodes.is_empty() {
        return Ok(());
    }
    let mut mask = [0_usize; NODES_MAX / WORD_BITS];
    for &node in nodes {
        let node = node as usize;
        let word = mask.get_mut(node / WORD_BITS).ok_or(io::ErrorKind::InvalidInput)?;
        *word |= 1 << (node % WORD_BITS);
    }
    let mode = if nodes.len() == 1 { libc::MPOL_PREFERRED } else { libc::MPOL_INTERLEAVE };
    // SAFETY: changes no contents, and no page that is there; the mask has as many bits as is said (the kernel reads one less).
    let code = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start,
            size_bytes,
            libc::c_long::from(mode),
            mask.as_ptr(),
            NODES_MAX + 1,
            0_usize,
        )
    };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
