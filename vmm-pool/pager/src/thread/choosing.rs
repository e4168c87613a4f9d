//! The choice of what the pager does next.

use super::super::prints::QUESTIONS;
use super::super::table::WindowChunks;
use super::super::uses::SLOTS;
use super::{COPIES_OUT_MAX, Job, LOOK_LATER, LOOK_SELDOM, LOOK_SOON};

/// Chooses the next job. A chunk that is used before `later_half`, in uses from now on, keeps its frame.
pub(super) fn choose(table: &mut WindowChunks, later_half: usize) -> Job {
    if table.broken.is_some() {
        return if table.is_ending { Job::End } else { Job::Wait(LOOK_SELDOM) };
    }
    if table.is_ending && table.resident() == 0 {
        return Job::End;
    }
    if let Some((full, slot)) = table.full() {
        return Job::Land(full, slot);
    }
    if let Some(surplus) = table.surplus() {
        return if table.is_ready(surplus) { Job::Shrink(surplus) } else { Job::Clean(surplus) };
    }
    let has_room = table.copies_out() < COPIES_OUT_MAX && table.free_question(QUESTIONS).is_some();
    let wanted = table.next_wanted();
    let free = table.free_slot(SLOTS);
    let mut is_keeping = false;
    if let Some((newcomer, slot)) = wanted.zip(free) {
        let victims = table.victims(newcomer);
        if victims.is_empty() && table.chunks()[newcomer].is_held() {
            // Without another frame, the waiting thread would wait for ever. It gets the error that refuses the frame.
            table.demand.widen();
            table.demand.owe_nothing();
        }
        if table.resident() < table.demand.frames_now() && table.demand.owed() == 0 {
            return Job::Bring { newcomer, victim: None, slot };
        }
        let idle = victims.into_iter().filter(|&id| table.chunks()[id].is_idle());
        let (late, soon): (Vec<_>, Vec<_>) =
            idle.partition(|&id| table.is_used_late(id, later_half));
        is_keeping = !soon.is_empty();
        let mut idle = late.into_iter();
        let first = idle.next();
        let ready = first.into_iter().chain(idle).find(|&id| table.is_ready(id));
        if ready.is_some() {
            return Job::Bring { newcomer, victim: ready, slot };
        }
        if let Some(first) = first.filter(|_| has_room) {
            return Job::Clean(first);
        }
    }
    if let Some(dirty) = table.to_clean(later_half).filter(|_| has_room) {
        return Job::Clean(dirty);
    }
    let is_busy = !table.marks().is_empty();
    Job::Wait(match (is_busy, wanted) {
        (true, Some(_)) => LOOK_SOON,
        (true, None) => LOOK_LATER,
        // The patience of the waiting thread ends.
        (false, Some(_)) if is_keeping => LOOK_LATER,
        (false, _) => LOOK_SELDOM,
    })
}
