//! Full chunks are mapped, and the answers of devices are read.

use std::sync::Arc;

use vmm_pool::driver::Driver;
use vmm_pool::{Describe, PoolError, PoolResult, StillChunk, Way};

use super::super::prints::{QUESTIONS, Questions};
use super::super::table::{Asked, ChunkEvent};
use super::Worker;

impl<D: Driver> Worker<'_, D> {
    /// Keeps the memory of questions for good: a question may be under way for ever, and the device writes there.
    pub(super) fn keep_questions(&mut self) {
        if let Some(questions) = self.questions.get_mut().and_then(Option::take) {
            questions.keep_for_good();
        }
    }

    /// Tells the table what devices have answered.
    pub(super) fn hear(&mut self) {
        let answered = self.shared.table().take_answered();
        for each in answered {
            let questions = self.questions.get_mut().and_then(Option::as_mut);
            if let Some(prints) = questions.map(|all| all.answer(each.1)) {
                let unseen = self.shared.table().told(&each, prints);
                if let Some(unseen) = unseen {
                    tracing::error!("{}", self.shared.describe(&unseen));
                }
            }
        }
    }

    /// Makes the device take the fingerprints of a claimed chunk. `None` if it does not, or if nobody knows when.
    ///
    /// # Errors
    /// The question may be under way: the chunk is not unmapped before it has been waited for.
    pub(super) fn ask(&mut self, chunk: usize) -> PoolResult<Option<Asked>> {
        let shared = self.shared;
        let question = shared.table().free_question(QUESTIONS);
        let Some(question) = question.filter(|&question| self.has_begun_to_ask(question, chunk))
        else {
            return Ok(None);
        };
        let mark = self.asking.streams().and_then(|streams| shared.mark_or_wait(streams));
        match mark {
            Ok(mark) => Ok(mark.map(|mark| Asked { question, mark })),
            Err(error) => self.finish_or_keep().map(|()| None).map_err(|_| error),
        }
    }

    /// With checks, makes the next copy wait for this question. A write that nobody has shown may fall between the two. Such a
    /// write must not be in the fingerprints alone.
    pub(super) fn behind_question(&mut self, asked: Option<&Asked>) -> PoolResult<()> {
        let shared = self.shared;
        let Some(asked) = asked.filter(|_| shared.table().checks.is_on) else { return Ok(()) };
        let stream = self.copies.streams()?.take_for(Way::Out)?;
        let ordered = shared.pool.driver().stream_wait_event(stream, asked.mark.event);
        ordered.about(|| "a copy for paging".to_owned(), 0, Some(shared.device))
    }

    fn has_begun_to_ask(&mut self, question: usize, chunk: usize) -> bool {
        let shared = self.shared;
        self.questions.get_or_init(|| {
            let made = Questions::new(shared.pool.driver(), shared.device);
            made.inspect_err(Self::not_asked).ok()
        });
        let Some(questions) = self.questions.get_mut() else { return false };
        let Some(asks) = questions.as_mut() else { return false };
        let streams = self.asking.streams();
        let stream = match streams.and_then(|streams| streams.take_for(Way::Out)) {
            Ok(stream) => stream,
            Err(error) => {
                Self::not_asked(&error);
                self.keep_questions();
                return false;
            }
        };
        let Err(error) = asks.ask(question, shared.range_of(chunk), stream) else { return true };
        Self::not_asked(&error);
        // Other questions may be under way.
        self.keep_questions();
        false
    }

    pub(super) fn not_asked(error: &PoolError) {
        tracing::warn!(%error, "paged memory is copied out whenever it was used");
    }

    /// Does the chunk's place have what the pager has written there, with no other write since?
    pub(super) fn is_place_as_seen(&self, chunk: usize) -> bool {
        let address = self.shared.range_of(chunk).start;
        let seen = self.sights.get(&chunk);
        seen.is_some_and(|seen| *seen == self.shared.pool.holdings().who_knows(address))
    }

    pub(super) fn see(&mut self, chunk: usize) {
        let now = self.shared.pool.holdings().who_knows(self.shared.range_of(chunk).start);
        self.sights.insert(chunk, now);
    }

    /// Maps a full chunk at its own addresses in the window. It was filled at the addresses for copies number `slot`.
    pub(super) fn land(&mut self, id: usize, slot: usize) {
        let entered = self.shared.pool.enter();
        let row = self.shared.table().chunks()[id].row();
        let still = row.and_then(|row| StillChunk::away(&entered, row));
        let aside = self.shared.range_aside(slot);
        let taken = still.ok_or(PoolError::NotOurs).and_then(|still| {
            self.remap(|| still.leave_aside(aside))?;
            Ok(still)
        });
        let still = match taken {
            Ok(still) => still,
            Err(error) => return self.shared.table().stuck(id, Arc::new(error.into())),
        };
        self.shared.table().change(id, ChunkEvent::LeftSlot);
        match self.remap(|| still.land()) {
            Ok(()) => {
                still.came();
                self.see(id);
                self.shared.table().came(id);
            }
            Err(error) => {
                still.did_not_come();
                self.shared.table().failed(id, Arc::new(error.into()));
            }
        }
    }
}
