//! The maps next to saved contents, as `docs/save.md` describes them.
//!
//! Identities and addresses are hexadecimal text: other languages' JSON loses digits of 64-bit numbers.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use vmm_pool::Contents;

use sublet_protocol::saving::SaveAccount;
use sublet_protocol::wire::{MemberInfo, MemberState};

/// The name of the format, which every map contains.
pub const FORMAT: &str = "sublet-save";
/// The version of the format. It changes when readers of the version before would misread a map.
pub const VERSION: u32 = 1;
/// The name of the map of all processes.
pub const TENANT_MAP: &str = "tenant.json";

/// `tenant.json`: which processes have written what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TenantMap {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// The tenant's name.
    pub tenant: String,
    /// Has every process written what it had saved?
    pub complete: bool,
    /// Those that have written.
    pub processes: Vec<SavedProcess>,
    /// Those that had nothing saved.
    pub nothing_saved: Vec<ProcessName>,
    /// Those that have written nothing, and why.
    pub failed: Vec<FailedProcess>,
}

/// One process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProcessName {
    /// Its process id.
    pub pid: u32,
    /// Its identity in the tenant.
    pub member: String,
    /// Start of its command line.
    pub command: String,
    /// Its state when it was asked.
    pub state: MemberState,
}

impl From<&MemberInfo> for ProcessName {
    fn from(info: &MemberInfo) -> Self {
        let (member, command) = (info.id.to_string(), info.command.clone());
        Self { pid: info.pid, member, command, state: info.state }
    }
}

/// One process that has written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SavedProcess {
    /// The process.
    #[serde(flatten)]
    pub process: ProcessName,
    /// The name of its map, a [`ProcessMap`].
    pub map: String,
    /// The bytes that it has written, and those that it had in addition.
    #[serde(flatten)]
    pub account: SaveAccount,
}

/// One process that has not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FailedProcess {
    /// Its process id, where it is known.
    pub pid: Option<u32>,
    /// Its identity in the tenant.
    pub member: String,
    /// Why.
    pub why: String,
}

/// The map of one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMap {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// The tenant's name.
    pub tenant: String,
    /// The process whose map this is.
    pub process: ProcessName,
    /// The name of its file with contents; none if it had no contents.
    pub data: Option<String>,
    /// The memory of the process, in bytes.
    pub account: SaveAccount,
    /// Its own memory.
    pub allocations: Vec<SavedAllocation>,
    /// Mapped memory of other processes; their owners save it.
    pub imports: Vec<ImportedAllocation>,
}

/// Memory that the process owns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedAllocation {
    /// Its identity, the same in every process that has it.
    pub id: String,
    /// The library that allocated it.
    pub library: String,
    /// The tag of its region; empty without one.
    pub tag: String,
    /// The way in which a pause treats its contents.
    pub contents: Contents,
    /// Its device; none for host memory.
    pub device: Option<DeviceName>,
    /// Its size.
    pub bytes: u64,
    /// The mappings that it had.
    pub addresses: Vec<MappedAt>,
    /// The offset of its first byte in the file with contents; none if nothing of it is saved.
    pub file_offset: Option<u64>,
    /// Parts that are saved. The rest of its range in the file is a hole.
    pub saved: Vec<Part>,
    /// Parts that are not.
    pub not_saved: Vec<Part>,
    /// The reason, if nothing is saved.
    pub why_not: Option<WhyNot>,
    /// The CRC-32 of zlib over the concatenated saved parts, as eight hexadecimal digits.
    pub crc32: Option<String>,
    /// The known identities of processes that have imported it.
    pub importers: Vec<String>,
}

/// Memory of another process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportedAllocation {
    /// Its identity, the same as in its owner's map.
    pub id: String,
    /// The library that imported it.
    pub library: String,
    /// Its owner's tag.
    pub tag: String,
    /// Its size.
    pub bytes: u64,
    /// The mappings that it had.
    pub addresses: Vec<MappedAt>,
    /// The identity of the process that owns it. None if that process has ended and was given up, or does not run under Sublet.
    pub owner: Option<String>,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceName {
    /// The machine-wide name, such as `GPU-5f00be66-6abd-452b-8111-0cecf4164a2a`.
    pub uuid: String,
    /// The ordinal in that process.
    pub ordinal: i32,
}

/// A mapping that begins at the first byte of its allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedAt {
    /// The first address, as `0x` and hexadecimal digits.
    pub address: String,
    /// The number of bytes that are mapped there.
    pub bytes: u64,
}

/// Part of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The offset from the allocation's first byte.
    pub offset: u64,
    /// Its length, in bytes.
    pub bytes: u64,
}

/// A reason why nothing of an allocation is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhyNot {
    /// The contents are in place, on the device or the host: no pause has removed them.
    InPlace,
    /// Its contents were to be discarded.
    Discarded,
    /// The application marked the contents as not needed.
    Unused,
}

impl From<&Range<u64>> for Part {
    fn from(range: &Range<u64>) -> Self {
        Self { offset: range.start, bytes: range.end - range.start }
    }
}

/// Returns the gaps that `parts` leave in `[0, size_bytes)`. `parts` are in order and do not overlap.
pub fn rest_of(parts: &[Range<u64>], size_bytes: u64) -> Vec<Part> {
    let begins = std::iter::once(0).chain(parts.iter().map(|part| part.end));
    let ends = parts.iter().map(|part| part.start).chain(std::iter::once(size_bytes));
    let rest = begins.zip(ends).filter(|(begin, end)| begin < end);
    rest.map(|(begin, end)| Part { offset: begin, bytes: end - begin }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_is_what_lies_between_before_and_behind() {
        let parts = |list: &[(u64, u64)]| -> Vec<Part> {
            list.iter().map(|&(offset, bytes)| Part { offset, bytes }).collect()
        };
        let saved = [2..4, 6..8];
        assert_eq!(rest_of(&saved, 10), parts(&[(0, 2), (4, 2), (8, 2)]));
        assert_eq!(rest_of(&saved, 8), parts(&[(0, 2), (4, 2)]));
        assert_eq!(rest_of(&[], 8), parts(&[(0, 8)]));
        let whole = Range { start: 0, end: 8 };
        assert_eq!(rest_of(&[whole], 8), []);
    }
}
