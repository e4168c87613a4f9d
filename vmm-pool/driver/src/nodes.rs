//! The NUMA nodes of host memory.

#![expect(unsafe_code, reason = "the standard library has no call that places pages")]

use std::io;

/// The number of bits in the kernel's mask. No machine has more nodes.
const NODES_MAX: usize = 1024;
const WORD_BITS: usize = usize::BITS as usize;

/// Places pages of a map at `start` on `nodes` when they are allocated later. One node is preferred, so a full node is no
/// error. With several nodes the pages alternate. With none it does nothing.
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
    // SAFETY: changes no contents, and no page that exists; the mask has as many bits as the argument says (the kernel reads
    // one less).
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
