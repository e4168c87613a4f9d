//! Writes to import slots.
//!
//! A slot is written only once the loader is done with it. While a library is being loaded its slots hold
//! addresses of the file, to which the loader adds the bias later: writing earlier would have it add to our
//! address. And a page that the loader will protect may be opened and closed again only after it has: the
//! loader still writes there before. Slots that are not ready are looked at again at the next walk.

#![expect(unsafe_code, reason = "opens pages that the loader has made read-only")]

use std::sync::atomic::{AtomicUsize, Ordering};

use super::object::{Import, Object, PAGE_BYTES};
use super::protections::{Protections, Rights};

/// The outcome for one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Settled {
    /// It leads to us, and led there before; or it had not been bound yet.
    Ours,
    /// It leads to us from now on, and led elsewhere before: earlier calls through it did not come to us.
    Turned,
    /// No library has the function, which is allowed; one that is loaded later does not change that.
    Absent,
    /// The loader has not finished with it.
    NotYet,
    /// It cannot be written, for this reason.
    Refused(String),
}

/// Makes `import`'s slot lead to `ours`, if the loader has finished with it.
///
/// `protections` is called only if there is something to write.
pub(super) fn settle<'a>(
    object: &Object<'_>,
    import: &Import<'_>,
    ours: usize,
    protections: impl FnOnce() -> &'a Protections,
) -> Settled {
    let Some(slot) = object.word(import.slot) else {
        return Settled::Refused("an import lies outside of the library".to_owned());
    };
    let before = value(slot);
    match before {
        value if value == ours => return Settled::Ours,
        0 if import.is_weak => return Settled::Absent,
        0 => return Settled::NotYet,
        value if object.is_unrelocated(value) => return Settled::NotYet,
        _ => {}
    }
    // Bound lazily, and not used yet, it leads into the library itself.
    let written = if object.contains(before) { Settled::Ours } else { Settled::Turned };
    let in_relro = object.is_in_relro(import.slot);
    match protections().at(import.slot) {
        Some(Rights { write: true, .. }) if in_relro => Settled::NotYet,
        Some(Rights { write: true, .. }) => {
            slot.store(ours, Ordering::Release);
            written
        }
        Some(rights) => match write_protected(slot, ours, rights) {
            Ok(()) => written,
            Err(why) => Settled::Refused(why),
        },
        None => Settled::Refused("an import lies where nothing is mapped".to_owned()),
    }
}

/// Returns the address in a slot.
pub(super) fn value(slot: &AtomicUsize) -> usize {
    slot.load(Ordering::Acquire)
}

/// Does the slot at `address` hold `held`? For a library that has not been unloaded since [`Object::word`] gave its address,
/// in a callback of the loader's, which unloads none meanwhile.
pub(super) fn holds(address: usize, held: usize) -> bool {
    let slot = std::ptr::with_exposed_provenance::<AtomicUsize>(address);
    // SAFETY: as above: the word is mapped and aligned.
    value(unsafe { &*slot }) == held
}

/// Makes the slot at `address` null. For a library that the loader is done with and never unloads.
pub(super) fn clear(address: usize, protections: &Protections) -> Result<(), String> {
    let rights = protections.at(address).ok_or("nothing is mapped there")?;
    let slot = std::ptr::with_exposed_provenance::<AtomicUsize>(address);
    // SAFETY: `Object::word` has given this address for a word, and its library stays.
    let slot = unsafe { &*slot };
    if rights.write {
        slot.store(0, Ordering::Release);
        return Ok(());
    }
    write_protected(slot, 0, rights)
}

/// Writes a slot whose page has `rights`, which it has again afterwards.
fn write_protected(slot: &AtomicUsize, ours: usize, rights: Rights) -> Result<(), String> {
    let bits = |rights: Rights| {
        let bit = |has, bit| if has { bit } else { libc::PROT_NONE };
        bit(rights.read, libc::PROT_READ)
            | bit(rights.write, libc::PROT_WRITE)
            | bit(rights.execute, libc::PROT_EXEC)
    };
    let address = std::ptr::from_ref(slot).expose_provenance() & !(PAGE_BYTES - 1);
    let page = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: the page is mapped, as `slot` lies in it, and gains a right: no access to it can fail by this.
    if unsafe { libc::mprotect(page, PAGE_BYTES, bits(Rights { write: true, ..rights })) } != 0 {
        let error = std::io::Error::last_os_error();
        return Err(format!("a read-only page of imports could not be opened: {error}"));
    }
    slot.store(ours, Ordering::Release);
    // SAFETY: as above; the right that is taken again is one that only we relied on, since the loader
    // is done with the page and any other writer opens it first, as we did.
    if unsafe { libc::mprotect(page, PAGE_BYTES, bits(rights)) } != 0 {
        let error = std::io::Error::last_os_error();
        tracing::warn!(%error, "a page of imports stays writable");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use object::elf::{PF_R, PT_GNU_RELRO};

    use super::super::object::tests::{IMAGE_BYTES, Image, SLOTS, header};
    use super::*;

    const OURS: usize = 0x7777_0000;

    /// Settles the slot of `dlsym` (or of the weak import) that holds `value`. Returns what becomes of the slot, and
    /// what it holds then.
    fn settled(image: &mut Image, value: usize, is_weak: bool) -> (Settled, usize) {
        let at = SLOTS + if is_weak { 16 } else { 0 };
        image.put(at, &[value as u64]);
        let info = image.info();
        // SAFETY: the segment is this image's buffer, which outlives the object.
        let object = unsafe { Object::of_loader(&info) }.expect("an object");
        let imports = object.imports().expect("tables");
        let find =
            |place| object.import_at(&imports, place).filter(|found| found.is_weak == is_weak);
        let import = imports.places().find_map(find).expect("an import");
        let protections = Protections::read();
        let settled = settle(&object, &import, OURS, || &protections);
        (settled, object.word(import.slot).expect("a word").load(Ordering::Relaxed))
    }

    #[test]
    fn a_slot_that_the_loader_has_filled_is_written_once() {
        let mut image = Image::new();
        // Bound lazily it leads into the library itself, and bound immediately somewhere else.
        let unbound = image.bias() + 0x1036;
        assert_eq!(settled(&mut image, unbound, false), (Settled::Ours, OURS));
        assert_eq!(settled(&mut image, 0x7fff_dead_0000, false), (Settled::Turned, OURS));
        assert_eq!(settled(&mut image, OURS, false), (Settled::Ours, OURS));
    }

    #[test]
    fn a_slot_that_the_loader_is_not_done_with_is_left_alone() {
        let mut image = Image::new();
        for value in [0, 0x1036] {
            assert_eq!(settled(&mut image, value, false), (Settled::NotYet, value));
        }
        assert_eq!(settled(&mut image, 0, true), (Settled::Absent, 0));
        // Its page will be protected, and is not yet.
        image.headers.push(header(PT_GNU_RELRO.0, PF_R.0, 0, IMAGE_BYTES));
        let bound = image.bias() + 0x1036;
        assert_eq!(settled(&mut image, bound, false), (Settled::NotYet, bound));
    }
}
