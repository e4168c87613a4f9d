//! The chunks that the calls on each stream use, with no event behind them yet: pure lists, with no driver, clock or
//! lock.
//!
//! | a list is | it has | left by |
//! | --- | --- | --- |
//! | open | the calls on its stream from now on | it is long, or somebody wants it to end: wanted |
//! | wanted | no new calls | all its calls are launched: ending, by the thread that finds that |
//! | ending | one thread that puts an event behind it | the event is recorded: gone. The stream is captured: wanted |
//!
//! The launch of a graph does not say which chunks it uses. Its list holds none of them, since graphs hold them themselves.
//! Chunks that are freed meanwhile are added to the list.

use vmm_pool::driver::RawStream;

/// The most calls that one event stands behind.
const CALLS_MAX: u32 = 64;
/// The most chunks that a list has, unless one call needs more.
const CHUNKS_MAX: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    Wanted,
    Ending,
}

#[derive(Debug)]
pub(super) struct List {
    number: u64,
    stream: RawStream,
    /// The chunks of the list. Each is held once for the list.
    pub(super) chunks: Vec<usize>,
    pub(super) has_graphs: bool,
    /// Calls that have looked up their chunks and are not launched yet.
    pending: u32,
    calls: u32,
    state: State,
}

impl List {
    fn is_open_for(&self, stream: RawStream) -> bool {
        self.stream == stream && self.state == State::Open
    }
}

/// See the head of this module.
#[derive(Debug, Default)]
pub(super) struct Lists {
    all: Vec<List>,
    made: u64,
}

impl Lists {
    fn open_or_new(&mut self, stream: RawStream) -> &mut List {
        let place = self.all.iter().position(|list| list.is_open_for(stream));
        let place = place.unwrap_or_else(|| {
            self.made += 1;
            self.all.push(List {
                number: self.made,
                stream,
                chunks: Vec::new(),
                has_graphs: false,
                pending: 0,
                calls: 0,
                state: State::Open,
            });
            self.all.len() - 1
        });
        &mut self.all[place]
    }

    /// Enters a call if its chunks are held for its stream already. Returns the number of its list.
    pub(super) fn enter(&mut self, ids: &[usize], stream: RawStream) -> Option<u64> {
        let list = self.all.iter_mut().find(|list| list.is_open_for(stream))?;
        if !ids.iter().all(|id| list.chunks.contains(id)) {
            return None;
        }
        list.pending += 1;
        Some(list.number)
    }

    /// Enters a call whose chunks are held for it. Returns the number of its list, and the chunks that the list held already.
    pub(super) fn add(&mut self, ids: &[usize], stream: RawStream) -> (u64, Vec<usize>) {
        let list = self.open_or_new(stream);
        list.pending += 1;
        let mut twice = Vec::new();
        for id in ids {
            let is_known = list.chunks.contains(id);
            if is_known { &mut twice } else { &mut list.chunks }.push(*id);
        }
        (list.number, twice)
    }

    /// Counts the lists that hold this chunk.
    pub(super) fn holding(&self, id: usize) -> u32 {
        self.all.iter().map(|list| u32::from(list.chunks.contains(&id))).sum()
    }

    /// Enters the launch of a graph. Returns the number of its list.
    pub(super) fn add_graph(&mut self, stream: RawStream) -> u64 {
        let list = self.open_or_new(stream);
        list.pending += 1;
        list.has_graphs = true;
        list.number
    }

    /// Records that a call of this list is launched. Returns the stream if the caller is to end the list.
    pub(super) fn launched(&mut self, number: u64) -> Option<RawStream> {
        let list = self.all.iter_mut().find(|list| list.number == number)?;
        list.pending = list.pending.saturating_sub(1);
        list.calls += 1;
        let is_long = list.calls >= CALLS_MAX || list.chunks.len() > CHUNKS_MAX;
        if list.state == State::Open && is_long {
            list.state = State::Wanted;
        }
        if list.state != State::Wanted || list.pending > 0 {
            return None;
        }
        list.state = State::Ending;
        Some(list.stream)
    }

    /// Marks the chosen lists to end. Returns the number that the next list would have.
    pub(super) fn want(&mut self, chosen: impl Fn(RawStream) -> bool) -> u64 {
        for list in self.all.iter_mut().filter(|list| chosen(list.stream)) {
            if list.state == State::Open {
                list.state = State::Wanted;
            }
        }
        self.made + 1
    }

    /// Takes the lists that are to end and have no call left to launch. The caller ends them.
    pub(super) fn take(&mut self, chosen: impl Fn(RawStream) -> bool) -> Vec<(u64, RawStream)> {
        let is_ready = |list: &&mut List| list.state == State::Wanted && list.pending == 0;
        let ready = self.all.iter_mut().filter(is_ready).filter(|list| chosen(list.stream));
        ready
            .map(|list| {
                list.state = State::Ending;
                (list.number, list.stream)
            })
            .collect()
    }

    /// Marks a list to end later: it cannot end now.
    pub(super) fn postpone(&mut self, number: u64) {
        for list in self.all.iter_mut().filter(|list| list.number == number) {
            list.state = State::Wanted;
        }
    }

    /// Removes a list: an event stands behind it, or nobody will know when its uses are over.
    pub(super) fn ended(&mut self, number: u64) -> Option<List> {
        let place = self.all.iter().position(|list| list.number == number)?;
        Some(self.all.swap_remove(place))
    }

    /// Moves chunks that graphs hold no more to the lists with graphs. Returns the number of those lists, each of which holds
    /// each chunk once.
    pub(super) fn take_over(&mut self, ids: &[usize]) -> u32 {
        let mut lists = 0;
        for list in self.all.iter_mut().filter(|list| list.has_graphs) {
            list.chunks.extend(ids);
            lists += 1;
        }
        lists
    }

    /// Is there a chosen list with a number below this that has not ended?
    pub(super) fn has(&self, chosen: impl Fn(RawStream) -> bool, below: u64) -> bool {
        self.all.iter().any(|list| chosen(list.stream) && list.number < below)
    }

    /// Is there a list to end whose calls are all launched?
    pub(super) fn is_any_ready(&self) -> bool {
        self.all.iter().any(|list| list.state == State::Wanted && list.pending == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: RawStream = RawStream(7);

    #[test]
    fn a_list_that_is_to_end_gets_no_new_call_and_ends_behind_its_last() {
        let mut lists = Lists::default();
        let (first, twice) = lists.add(&[1, 2], STREAM);
        assert_eq!((twice, lists.enter(&[2], STREAM)), (Vec::new(), Some(first)));
        assert_eq!(lists.enter(&[3], STREAM), None, "it is not held");
        let below = lists.want(|_| true);
        assert_eq!(lists.take(|_| true), [], "two calls are not launched");
        assert!(!lists.is_any_ready());
        let (second, _) = lists.add(&[2], STREAM);
        assert_ne!(first, second);
        assert_eq!((lists.launched(first), lists.launched(first)), (None, Some(STREAM)));
        assert!(lists.has(|_| true, below), "no event stands behind it yet");
        assert_eq!(lists.ended(first).map(|gone| gone.chunks), Some(vec![1, 2]));
        assert!(!lists.has(|_| true, below), "the second came later");
        assert_eq!(lists.launched(second), None, "nobody wants it to end");
    }

    #[test]
    fn a_list_that_is_long_ends_with_its_last_call() {
        let mut lists = Lists::default();
        let ids: Vec<_> = (0..=CHUNKS_MAX).collect();
        let (long, _) = lists.add(&ids, STREAM);
        assert_eq!(lists.launched(long), Some(STREAM));
        let (many, _) = lists.add(&[0], RawStream(8));
        for _ in 1..CALLS_MAX {
            assert_eq!(lists.launched(many), None);
            assert_eq!(lists.enter(&[0], RawStream(8)), Some(many));
        }
        assert_eq!(lists.launched(many), Some(RawStream(8)));
    }

    #[test]
    fn what_cannot_end_now_is_found_again() {
        let mut lists = Lists::default();
        let (number, _) = lists.add(&[1], STREAM);
        lists.launched(number);
        lists.want(|stream| stream == STREAM);
        assert_eq!(lists.take(|_| true), [(number, STREAM)]);
        assert_eq!((lists.take(|_| true), lists.is_any_ready()), (Vec::new(), false));
        lists.postpone(number);
        assert!(lists.is_any_ready());
        assert_eq!(lists.take(|_| true), [(number, STREAM)]);
    }

    #[test]
    fn lists_with_launches_of_graphs_hold_what_graphs_let_go() {
        let mut lists = Lists::default();
        let (calls, _) = lists.add(&[1], STREAM);
        let ended = lists.add_graph(RawStream(8));
        assert_eq!(lists.launched(ended), None);
        lists.want(|stream| stream == RawStream(8));
        assert_eq!(lists.take(|_| true), [(ended, RawStream(8))]);
        // Another thread is about to end that list.
        let open = lists.add_graph(STREAM);
        assert_eq!(open, calls);
        assert_eq!(lists.take_over(&[4, 5]), 2);
        let gone = lists.ended(ended).expect("it was there");
        assert_eq!((gone.chunks, gone.has_graphs), (vec![4, 5], true));
        let gone = lists.ended(open).expect("it was there");
        assert_eq!((gone.chunks, gone.has_graphs), (vec![1, 4, 5], true));
        assert!(lists.ended(open).is_none());
    }
}
