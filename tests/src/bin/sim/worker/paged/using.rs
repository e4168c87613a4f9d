//! Uses of what is paged, as kernels make them.

use std::sync::{Arc, Mutex, PoisonError};

use sublet_pager::In;
use sublet_tests::{Outcome, Trouble};
use vmm_pool::driver::sim::SimDriver;
use vmm_pool::driver::{DeviceOrdinal, DriverCode, RawStream};
use vmm_pool::gate::Passage;

use crate::worker::calls::device_refused;
use crate::worker::memory::{self, Paint};

use super::{Block, Holds, LIMIT, Paged};

impl Paged {
    /// Uses the next blocks in their order, which changes now and then.
    pub(super) fn use_some(&mut self) -> Outcome<bool> {
        if self.random.u8(..10) == 0
            && let Some(window) = &mut self.window
        {
            self.random.shuffle(&mut window.order);
        }
        for _ in 0..self.random.u8(1..4) {
            let Some(window) = &mut self.window else { return Ok(true) };
            let count = window.order.len();
            let wanted = self.random.usize(1..=2.min(count));
            let mut blocks: Vec<_> =
                (0..wanted).map(|ahead| window.order[(window.next + ahead) % count]).collect();
            window.next = (window.next + wanted) % count;
            while !blocks.is_empty() && !window.fits(&blocks) {
                blocks.pop();
            }
            if blocks.is_empty() {
                continue;
            }
            if self.random.u8(..3) > 0 {
                // What comes next, or now and then something else.
                let ahead = if self.random.u8(..8) == 0 { self.random.usize(..count) } else { 0 };
                let next = window.order[(window.next + ahead) % count];
                let announced = window.pager.announce(&window.starts(&[next]));
                self.judged("an announcement", announced)?;
            }
            let writes = self.random.bool();
            if !self.use_blocks(&blocks, writes)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A use of these blocks by one stream.
    pub(super) fn use_blocks(&mut self, blocks: &[usize], writes: bool) -> Outcome<bool> {
        if !self.make_current()? {
            return Ok(false);
        }
        self.count(if writes { "uses that write" } else { "uses that read" }, 1);
        let stream = self.random.usize(..2);
        let raw = self.streams[stream];
        let Some(window) = &self.window else { return Ok(true) };
        let (pager, starts) = (Arc::clone(&window.pager), window.starts(blocks));
        // The graph was launched, which names nothing.
        if blocks.iter().all(|block| window.is_kept(*block)) {
            let touched = pager.begin_graph([In::Stream(raw), In::OwnStream(raw)][stream]);
            let touched = touched.ok_or_else(|| Trouble::new("no graph is known of"))?;
            self.launch(blocks, stream, writes)?;
            pager.end_call(&touched);
            return Ok(true);
        }
        // Any byte of a block will do.
        let byte = |index: &usize| {
            let block = &window.blocks[*index];
            block.part(self.random.usize(..block.pages.len()), 1)
        };
        let words: Vec<_> = blocks.iter().map(byte).collect();
        let is_held = self.random.u8(..4) == 0;
        if is_held {
            let held = pager.acquire(&starts, LIMIT);
            if self.judged("blocks that are mapped", held)?.is_none() {
                return Ok(false);
            }
        }
        let place = [In::Stream(raw), In::OwnStream(raw)][stream];
        let begun = pager.begin_call(&words, place, LIMIT);
        let touched = self.judged("a call", begun)?;
        if let Some(touched) = &touched {
            let touched =
                touched.as_ref().ok_or_else(|| Trouble::new("what is paged is not known"))?;
            self.launch(blocks, stream, writes)?;
            pager.end_call(touched);
        }
        if is_held && self.window.is_some() {
            let released = pager.release(&starts);
            self.judged("blocks that may leave", released)?;
        }
        Ok(touched.is_some())
    }

    /// Hands kernels to a stream, behind those of the other.
    fn launch(&mut self, blocks: &[usize], stream: usize, writes: bool) -> Outcome {
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::Use);
        let (core, driver) = (member.pool().driver().core(), member.pool().driver());
        let raw = self.streams[stream];
        core.order_behind(raw, self.marks[1 - stream]).map_err(device_refused)?;
        for &index in blocks {
            let Some(count) = self.window.as_ref().map(|window| window.blocks[index].pages.len())
            else {
                break;
            };
            let ((first, pages), pattern) = (self.written_pages(count), self.next_pattern());
            let Some(window) = &mut self.window else { break };
            let block = &mut window.blocks[index];
            if !writes {
                read(driver, (self.device, raw), block, &self.wrong).map_err(device_refused)?;
                continue;
            }
            let (part, paint) = (block.part(first, pages), Paint::plain(pattern));
            memory::queue_write(driver, (self.device, raw), part, paint).map_err(device_refused)?;
            block.pages[first..first + pages].fill(Holds::Is(pattern));
        }
        core.record_event(self.marks[stream], raw).map_err(device_refused)
    }

    /// From which page on, and how many: all of them, or some.
    fn written_pages(&mut self, count: usize) -> (usize, usize) {
        if self.random.bool() {
            return (0, count);
        }
        let first = self.random.usize(..count);
        (first, self.random.usize(1..=count - first))
    }

    fn next_pattern(&mut self) -> u64 {
        if self.random.u8(..8) == 0 {
            return 0;
        }
        self.patterns += 1;
        (self.number << 32) | (1 << 29) | self.patterns
    }
}

/// A kernel that reads a block, and says what is wrong there.
fn read(
    driver: &SimDriver,
    target: (DeviceOrdinal, RawStream),
    block: &Block,
    wrong: &Arc<Mutex<Option<String>>>,
) -> Result<(), DriverCode> {
    let (block, wrong) = (block.clone(), Arc::clone(wrong));
    memory::queue_read(driver, target, block.range(), move |pages| {
        let mut all = block.pages.iter().zip(pages).enumerate();
        let other = all.find(|(_, (holds, seen))| !holds.has(**seen));
        if let Some((page, (holds, _))) = other {
            let seen: Vec<_> = pages[page..].iter().take(4).collect();
            let text = format!(
                "page {page} of {} paged ones from {}: {holds:?} wanted, {seen:?} and so on found",
                pages.len(),
                block.start
            );
            wrong.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(text);
        }
    })
}
