//! Moves contents between devices and the file, through the pool's slots of pinned host memory.
//!
//! ```text
//!   pause:   device --copy--> slot --writer threads--> file
//!   resume:  file --reader threads--> slot --copy--> device
//! ```
//!
//! The disk is the slowest part by far, so it must never wait. While threads write or read one slot, the calling thread
//! copies the next.

use std::io::ErrorKind;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::Builder;

use crossbeam_channel::{Receiver, Sender, unbounded};
use vmm_pool::{FilePlace, PoolError, PoolResult};

use crate::file::{DiskFile, Writer};

/// The number of threads that write, or read. One reaches three quarters of the disk's speed, four reach nine tenths.
const FILE_THREADS: usize = 4;

/// A slot and its job, and the outcome. No slot and no job when a thread ends, also by a panic.
type Told<S, J> = (Option<(S, J)>, PoolResult<()>);

/// Starts threads that do `work` on the slots that `lead` sends them, and send the slots back. A thread ends once
/// nobody receives its answers.
fn by_threads<S: Send, J: Send>(
    file: &DiskFile,
    work: impl Fn(&mut Writer, &mut S, &J) -> PoolResult<()> + Sync,
    lead: impl FnOnce(Sender<(S, J)>, Receiver<Told<S, J>>) -> PoolResult<()>,
) -> PoolResult<()> {
    std::thread::scope(|scope| {
        let ((give, given), (tell, told)) = (unbounded::<(S, J)>(), unbounded());
        for _ in 0..FILE_THREADS {
            let (given, tell, work) = (given.clone(), tell.clone(), &work);
            let each = move || {
                let all = AssertUnwindSafe(|| {
                    let mut writer = Writer::default();
                    for (mut slot, job) in given {
                        let outcome = work(&mut writer, &mut slot, &job);
                        if tell.send((Some((slot, job)), outcome)).is_err() {
                            break;
                        }
                    }
                    writer.settle(file)
                });
                // A panic loses a slot and its job: nobody may wait for them.
                let lost = |_| Err(file.refused("moving", &(0..0), ErrorKind::Other.into()));
                let _told = tell.send((None, catch_unwind(all).unwrap_or_else(lost)));
            };
            let thread = Builder::new().name("sublet-file".to_owned()).spawn_scoped(scope, each);
            thread.map_err(|error| file.refused("starting a thread for", &(0..0), error))?;
        }
        drop((given, tell));
        lead(give, told)
    })
}

/// Returns the length of a place, in bytes.
fn length_of(place: &Range<u64>) -> usize {
    usize::try_from(place.end - place.start).unwrap_or(usize::MAX)
}

/// See [`vmm_pool::ContentsFile::write_behind`].
pub(crate) fn write_behind<S: AsRef<[u8]> + Send>(
    file: &DiskFile,
    slots: Vec<S>,
    fill: &mut dyn FnMut(&mut S) -> PoolResult<Option<FilePlace>>,
) -> PoolResult<()> {
    let write = |writer: &mut Writer, slot: &mut S, (place, lengths_bytes): &FilePlace| {
        writer.write(file, place.start, &slot.as_ref()[..length_of(place)], lengths_bytes)
    };
    by_threads(file, write, |give, told| {
        let mut idle = slots;
        let written = || match told.recv() {
            Ok((Some((slot, _)), written)) => written.map(|()| slot),
            // Without a slot, the contents would be lost.
            _ => Err(file.refused("writing", &(0..0), ErrorKind::NotFound.into())),
        };
        let mut fill_all = || loop {
            let mut slot = idle.pop().map_or_else(written, Ok)?;
            let Some(place) = fill(&mut slot)? else { return Ok(()) };
            // Threads end only when this sender is closed.
            let _taken = give.send((slot, place));
        };
        let outcome = fill_all();
        drop(give);
        // Receives until every thread has ended.
        told.iter().fold(outcome, |all, (_, outcome)| all.and(outcome))
    })?;
    file.finish()
}

/// See [`vmm_pool::ContentsFile::read_ahead`].
pub(crate) fn read_ahead<S: AsMut<[u8]> + Send>(
    file: &DiskFile,
    slots: Vec<S>,
    places: &[Range<u64>],
    each: &mut dyn FnMut(usize, &S) -> PoolResult<()>,
) -> PoolResult<()> {
    let read = |_: &mut Writer, slot: &mut S, (_, place): &(usize, Range<u64>)| {
        file.read_written(place.start, &mut slot.as_mut()[..length_of(place)], true)
    };
    by_threads(file, read, |give, told| {
        let mut next = places.iter().cloned().enumerate();
        slots.into_iter().zip(next.by_ref()).for_each(|job| drop(give.send(job)));
        for place in places {
            let Ok((Some((slot, (index, _))), read)) = told.recv() else {
                let source = ErrorKind::Interrupted.into();
                return Err(PoolError::file_unreadable(&file.dir, place, source));
            };
            read.and_then(|()| each(index, &slot))?;
            if let Some(job) = next.next() {
                let _given = give.send((slot, job));
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use vmm_pool::{ContentsFile as _, PoolError};

    use super::*;

    /// As many as a pool has.
    const SLOTS: usize = 8;
    const PIECE_BYTES: u64 = 1 << 20;
    /// More than there are slots.
    const PIECES: u64 = 3 * SLOTS as u64;

    fn places() -> Vec<Range<u64>> {
        (0..PIECES).map(|index| index * PIECE_BYTES..(index + 1) * PIECE_BYTES).collect()
    }

    fn slots() -> Vec<Vec<u8>> {
        vec![vec![0; 1 << 20]; SLOTS]
    }

    fn value(place: &Range<u64>) -> u8 {
        u8::try_from(place.start / PIECE_BYTES + 1).unwrap()
    }

    fn write_places(file: &DiskFile) -> PoolResult<()> {
        let mut places = places().into_iter();
        write_behind(file, slots(), &mut |slot| {
            let Some(place) = places.next() else { return Ok(None) };
            slot.fill(value(&place));
            Ok(Some((place, vec![PIECE_BYTES])))
        })
    }

    #[test]
    fn every_piece_comes_back_through_fewer_slots_than_pieces() {
        let dir = tempfile::tempdir().unwrap();
        let file = DiskFile::create(dir.path()).unwrap().past_the_cache();
        file.reserve(&places()).unwrap();
        write_places(&file).unwrap();
        let mut seen = vec![false; places().len()];
        read_ahead(&file, slots(), &places(), &mut |index, slot| {
            let expected = value(&places()[index]);
            assert!(slot.iter().all(|byte| *byte == expected), "piece {index}");
            seen[index] = true;
            Ok(())
        })
        .unwrap();
        assert!(seen.into_iter().all(|seen| seen));
    }

    #[test]
    fn a_full_disk_ends_the_writing_with_an_error_that_names_the_place() {
        let error = write_places(&DiskFile::full()).unwrap_err();
        let PoolError::FileRefused { size_bytes, source, .. } = &error else { panic!("{error}") };
        assert_eq!((*size_bytes, source.kind()), (PIECE_BYTES, ErrorKind::StorageFull));
    }

    #[test]
    fn a_piece_that_is_lost_on_its_way_to_the_disk_fails_the_writing() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        // The last one is its writer's last too: no piece after it settles it.
        for lost in [0, PIECES / 2, PIECES - 1] {
            let file = DiskFile::broken_at(dir.path(), lost * PIECE_BYTES);
            let error = write_places(&file).unwrap_err();
            let PoolError::FileRefused { offset_bytes, .. } = &error else { panic!("{error}") };
            assert_eq!(*offset_bytes, lost * PIECE_BYTES, "{error}");
        }
    }

    #[test]
    fn what_the_last_flush_says_counts() {
        let error = write_places(&DiskFile::without_flush()).unwrap_err();
        assert!(matches!(error, PoolError::FileRefused { operation: "writing", .. }), "{error}");
    }

    /// A slot that nobody can fill.
    #[derive(Debug)]
    struct Broken;

    impl AsMut<[u8]> for Broken {
        fn as_mut(&mut self) -> &mut [u8] {
            panic!("broken")
        }
    }

    #[test]
    fn a_thread_that_panics_with_the_only_slot_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let file = DiskFile::create(dir.path()).unwrap();
        let read = read_ahead(&file, vec![Broken], &places(), &mut |_, _| Ok(()));
        assert!(matches!(read, Err(PoolError::FileUnreadable { .. })), "{read:?}");
    }

    #[test]
    fn what_fails_between_the_pieces_ends_the_reading() {
        let dir = tempfile::tempdir().unwrap();
        let file = DiskFile::over(tempfile::tempfile_in(&dir).unwrap(), dir.path().to_owned());
        write_places(&file).unwrap();
        let mut calls = 0;
        let outcome = read_ahead(&file, slots(), &places(), &mut |_, _| {
            calls += 1;
            if calls == 3 { Err(PoolError::NotOurs) } else { Ok(()) }
        });
        assert!(matches!(outcome, Err(PoolError::NotOurs)));
        assert_eq!(calls, 3);
    }
}
