//! One library in memory, as the loader mapped it: its segments, and its imports by name.
//!
//! Sizes and offsets in an image are whatever its maker wrote. Every range is checked to lie inside one
//! segment that the loader mapped readable, so that a malformed image yields nothing instead of a fault.
//! The structures are those of the `object` crate; addresses are used as they lie in memory, not as in the
//! file.

#![expect(unsafe_code, reason = "reads the images of loaded libraries")]

use std::ffi::{CStr, c_int, c_void};
use std::marker::PhantomData;
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicUsize;

use object::LittleEndian;
use object::elf::{
    DT_JMPREL, DT_NEEDED, DT_NULL, DT_PLTREL, DT_PLTRELSZ, DT_RELA, DT_RELASZ, DT_SONAME, DT_STRSZ,
    DT_STRTAB, DT_SYMTAB, Dyn64, DynamicTag, PF_R, PF_W, PT_DYNAMIC, PT_GNU_RELRO, PT_LOAD,
    R_X86_64_64, R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT, Rela64, SHN_UNDEF, STB_WEAK, Sym64,
};

/// Files of this byte order only: the crate is for x86-64.
const ORDER: LittleEndian = LittleEndian;
/// The kernel's page size on x86-64.
pub(super) const PAGE_BYTES: usize = 4096;

type Rela = Rela64<LittleEndian>;

/// Part of an image that the loader mapped.
#[derive(Clone, Debug)]
struct Segment {
    range: Range<usize>,
    flags: u32,
}

/// A loaded library, while the loader keeps its list of libraries unchanged.
///
/// # Invariants
/// Every segment is mapped for `'walk`.
#[derive(Debug)]
pub(super) struct Object<'walk> {
    /// As the loader names it; empty for the program itself.
    pub(super) name: &'walk CStr,
    /// The number that the loader adds to addresses of the file.
    pub(super) bias: usize,
    segments: Vec<Segment>,
    relro: Range<usize>,
    dynamic: Range<usize>,
    mapped: PhantomData<&'walk ()>,
}

/// The place of one of an object's relocations: its table, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Of functions that are called (`DT_JMPREL`).
    Calls(usize),
    /// Of everything else (`DT_RELA`).
    Data(usize),
}

/// A pointer that the loader fills with the address of another library's function.
#[derive(Clone, Copy, Debug)]
pub(super) struct Import<'walk> {
    /// The address of the pointer.
    pub(super) slot: usize,
    /// The function's name.
    pub(super) name: &'walk CStr,
    /// May stay null when no library has the function.
    pub(super) is_weak: bool,
}

/// The tables of an object that name its imports.
#[derive(Debug)]
pub(super) struct Imports<'walk> {
    calls: &'walk [Rela],
    data: &'walk [Rela],
    symbols: usize,
    names: &'walk [u8],
}

/// The numbers of libraries that the loader has ever loaded, and ever unloaded.
pub(super) type Loads = (u64, u64);

/// A function for each library of the loader's list, or none for a malformed one. It decides when the list ends.
type Look<'look> = &'look mut dyn FnMut(Loads, Option<Object<'_>>) -> ControlFlow<()>;

/// Calls `look` for each library of the loader's list, whose lock is held meanwhile.
pub(super) fn each(mut look: Look<'_>) {
    // SAFETY: `visit` is a callback as `dl_iterate_phdr` takes it, and its data outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut look).cast()) };
}

unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    let look: *mut Look<'_> = data.cast();
    // SAFETY: `each` passes its own, which nobody else uses meanwhile.
    let look = unsafe { &mut *look };
    // SAFETY: the loader passes a valid structure for the time of the call.
    let info = unsafe { &*info };
    // SAFETY: this is the callback, and the object is dropped before it returns.
    let object = unsafe { Object::of_loader(info) };
    let loads = (info.dlpi_adds, info.dlpi_subs);
    let looked = catch_unwind(AssertUnwindSafe(|| look(loads, object)));
    c_int::from(
        looked
            .unwrap_or_else(|_| {
                tracing::error!("a library could not be looked at; please report this");
                ControlFlow::Continue(())
            })
            .is_break(),
    )
}

impl<'walk> Object<'walk> {
    /// Returns the library of the loader's callback.
    ///
    /// # Safety
    /// `info` is the argument of a callback of `dl_iterate_phdr`, and `'walk` ends with that callback. The
    /// loader's list of libraries is locked until then, and no library is unmapped.
    pub(super) unsafe fn of_loader(info: &'walk libc::dl_phdr_info) -> Option<Self> {
        if info.dlpi_phdr.is_null() {
            return None;
        }
        let count = usize::from(info.dlpi_phnum);
        // SAFETY: the loader gives this many headers, which live as long as the library.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, count) };
        let name = if info.dlpi_name.is_null() {
            c""
        } else {
            // SAFETY: the loader's names are terminated and live as long as the library.
            unsafe { CStr::from_ptr(info.dlpi_name) }
        };
        let bias = usize::try_from(info.dlpi_addr).ok()?;
        let place = |header: &libc::Elf64_Phdr| {
            let start = bias.wrapping_add(usize::try_from(header.p_vaddr).ok()?);
            let end = start.checked_add(usize::try_from(header.p_memsz).ok()?)?;
            Some(start..end)
        };
        let of_kind = |kind| headers.iter().filter(move |header| header.p_type == kind);
        let segments = of_kind(PT_LOAD.0)
            .filter_map(|header| Some(Segment { range: place(header)?, flags: header.p_flags }))
            .collect();
        // The loader protects whole pages only: what is behind the last whole one stays writable.
        let page = |address: usize| address & !(PAGE_BYTES - 1);
        let relro = of_kind(PT_GNU_RELRO.0).find_map(place).unwrap_or_default();
        let relro = page(relro.start)..page(relro.end);
        let dynamic = of_kind(PT_DYNAMIC.0).find_map(place)?;
        Some(Self { name, bias, segments, relro, dynamic, mapped: PhantomData })
    }

    /// Is `address` in one of its segments?
    pub(super) fn contains(&self, address: usize) -> bool {
        self.segments.iter().any(|segment| segment.range.contains(&address))
    }

    /// Returns the range from its first byte to its last.
    pub(super) fn span(&self) -> Option<Range<usize>> {
        let start = self.segments.iter().map(|segment| segment.range.start).min()?;
        let end = self.segments.iter().map(|segment| segment.range.end).max()?;
        Some(start..end)
    }

    /// Is `value` an address of the file, to which the bias has not been added yet?
    pub(super) fn is_unrelocated(&self, value: usize) -> bool {
        self.bias != 0 && !self.contains(value) && self.contains(self.bias.wrapping_add(value))
    }

    /// Does the loader make the page of `address` read-only once it has relocated the object?
    pub(super) fn is_in_relro(&self, address: usize) -> bool {
        self.relro.contains(&address)
    }

    /// Returns the ranges in which it keeps data that it may change at any time.
    pub(super) fn data(&self) -> impl Iterator<Item = Range<usize>> {
        let writable = |segment: &&Segment| segment.flags & (PF_R | PF_W).0 == (PF_R | PF_W).0;
        self.segments.iter().filter(writable).flat_map(|segment| {
            let range = segment.range.clone();
            let before = range.start..self.relro.start.clamp(range.start, range.end);
            let behind = self.relro.end.clamp(range.start, range.end)..range.end;
            // Without such a part, all data is writable.
            if self.relro.is_empty() { [range, 0..0] } else { [before, behind] }
        })
    }

    /// A word of its data, as other threads may change it.
    pub(super) fn word(&self, address: usize) -> Option<&'walk AtomicUsize> {
        let end = address.checked_add(size_of::<usize>())?;
        if !address.is_multiple_of(align_of::<AtomicUsize>()) || !self.is_readable(address..end) {
            return None;
        }
        let word = std::ptr::with_exposed_provenance::<AtomicUsize>(address);
        // SAFETY: aligned, and inside a segment, which is mapped for 'walk by the invariant; everybody else
        // who changes it is the loader or the library itself, by whole words.
        unsafe { word.as_ref() }
    }

    fn is_readable(&self, range: Range<usize>) -> bool {
        self.segments.iter().any(|segment| {
            segment.flags & PF_R.0 != 0
                && segment.range.start <= range.start
                && range.end <= segment.range.end
        })
    }

    /// `bytes` bytes of a part that does not change once the loader has mapped it.
    fn constant(&self, address: usize, bytes: usize) -> Option<&'walk [u8]> {
        if address == 0 || !self.is_readable(address..address.checked_add(bytes)?) {
            return None;
        }
        let start = std::ptr::with_exposed_provenance::<u8>(address);
        // SAFETY: inside a segment, which is mapped for 'walk by the invariant; callers ask for the tables of
        // symbols and relocations only, which are never written to.
        Some(unsafe { std::slice::from_raw_parts(start, bytes) })
    }

    /// An address in the dynamic section, to which most loaders have added the bias and some have not.
    fn resolve(&self, value: usize) -> Option<usize> {
        let biased = self.bias.wrapping_add(value);
        [value, biased].into_iter().find(|&address| self.contains(address))
    }

    /// The values of its dynamic section under the tag `wanted`; none where the section is malformed.
    fn values(&self, wanted: DynamicTag) -> impl Iterator<Item = usize> + use<'walk> {
        let bytes = self.dynamic.end - self.dynamic.start;
        let count = bytes / size_of::<Dyn64<LittleEndian>>();
        let section = self.constant(self.dynamic.start, bytes).unwrap_or_default();
        let entries = object::slice_from_bytes::<Dyn64<LittleEndian>>(section, count);
        let entries = entries.map_or(&[][..], |(entries, _)| entries);
        let used = entries.iter().take_while(|entry| entry.d_tag.get(ORDER) != DT_NULL);
        used.filter(move |entry| entry.d_tag.get(ORDER) == wanted)
            .filter_map(|entry| usize::try_from(entry.d_val.get(ORDER)).ok())
    }

    /// Returns the text of its names.
    fn names(&self) -> Option<&'walk [u8]> {
        let (start, bytes) = (self.values(DT_STRTAB).next()?, self.values(DT_STRSZ).next()?);
        self.constant(self.resolve(start)?, bytes)
    }

    /// Returns the names under the tag `wanted`.
    fn named(&self, wanted: DynamicTag) -> Vec<&'walk CStr> {
        let names = self.names().unwrap_or_default();
        let name = |start: usize| CStr::from_bytes_until_nul(names.get(start..)?).ok();
        self.values(wanted).filter_map(name).collect()
    }

    /// Returns the libraries that it depends on, in its own order.
    pub(super) fn needed(&self) -> Vec<&'walk CStr> {
        self.named(DT_NEEDED)
    }

    /// Returns the name by which others depend on it, if it has one.
    pub(super) fn soname(&self) -> Option<&'walk CStr> {
        self.named(DT_SONAME).first().copied()
    }

    /// The tables of what it imports; `None` when it has none, or they are malformed.
    pub(super) fn imports(&self) -> Option<Imports<'walk>> {
        let value = |wanted: DynamicTag| self.values(wanted).next();
        let table = |start, bytes| -> Option<&'walk [Rela]> {
            let (Some(start), Some(bytes)) = (value(start), value(bytes)) else {
                return Some(&[]);
            };
            let bytes = bytes - bytes % size_of::<Rela>();
            let found = self.constant(self.resolve(start)?, bytes)?;
            object::slice_from_all_bytes(found).ok()
        };
        let is_rela = value(DT_PLTREL).is_none_or(|kind| i64::try_from(kind) == Ok(DT_RELA.0));
        let calls = if is_rela { table(DT_JMPREL, DT_PLTRELSZ)? } else { &[] };
        let names = self.names()?;
        let symbols = self.resolve(value(DT_SYMTAB)?)?;
        Some(Imports { calls, data: table(DT_RELA, DT_RELASZ)?, symbols, names })
    }

    /// Returns the import at `place`; `None` if the relocation there is of another kind, or malformed.
    pub(super) fn import_at(
        &self,
        imports: &Imports<'walk>,
        place: Place,
    ) -> Option<Import<'walk>> {
        let relocation = match place {
            Place::Calls(number) => imports.calls.get(number),
            Place::Data(number) => imports.data.get(number),
        }?;
        let is_pointer = match relocation.r_type(ORDER, false) {
            R_X86_64_JUMP_SLOT | R_X86_64_GLOB_DAT => true,
            R_X86_64_64 => relocation.r_addend.get(ORDER) == 0,
            _ => false,
        };
        if !is_pointer {
            return None;
        }
        let number = usize::try_from(relocation.r_sym(ORDER, false)).ok()?;
        let offset = number.checked_mul(size_of::<Sym64<LittleEndian>>())?;
        let address = imports.symbols.checked_add(offset)?;
        let bytes = self.constant(address, size_of::<Sym64<LittleEndian>>())?;
        let (symbol, _) = object::from_bytes::<Sym64<LittleEndian>>(bytes).ok()?;
        // What it has itself is no import: an interposer's calls of its own functions stay its own.
        if number == 0 || symbol.st_shndx.get(ORDER) != SHN_UNDEF {
            return None;
        }
        let name = imports.names.get(usize::try_from(symbol.st_name.get(ORDER)).ok()?..)?;
        let slot = self.bias.wrapping_add(usize::try_from(relocation.r_offset.get(ORDER)).ok()?);
        let is_weak = symbol.st_bind() == STB_WEAK;
        Some(Import { slot, name: CStr::from_bytes_until_nul(name).ok()?, is_weak })
    }
}

impl Imports<'_> {
    /// Returns the places in which imports may be.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> + use<> {
        let (calls, data) = self.sizes();
        (0..calls).map(Place::Calls).chain((0..data).map(Place::Data))
    }

    /// Counts the relocations: those of calls, and those of everything else.
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.calls.len(), self.data.len())
    }
}

#[cfg(test)]
pub(super) mod tests;
