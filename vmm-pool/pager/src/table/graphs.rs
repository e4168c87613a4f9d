//! The chunks that launches of graphs use: all that graphs have recorded. One event behind a launch stands for all of them. A
//! launch on a thread's own default stream is the exception: it holds each chunk.

use std::sync::Arc;

use super::{Mark, WindowChunks, distinct};

impl WindowChunks {
    /// Records a launch of a graph, which is over when `mark` is.
    pub(crate) fn graph_used(&mut self, mark: &Arc<Mark>) {
        self.graph_uses.push(Arc::clone(mark));
    }

    /// Moves chunks that graphs hold no more to `lists` lists of launches, which hold them instead. The chunks also wait for
    /// launches whose lists have ended.
    pub(crate) fn graphs_let_go(&mut self, ids: &[usize], lists: u32) {
        for id in distinct(ids) {
            self.chunks[id].uses.extend(self.graph_uses.iter().cloned());
        }
        for &id in ids {
            self.chunks[id].holders += lists;
        }
        self.let_go(ids);
    }

    /// Records that nobody knows when a use of these chunks is over.
    pub(crate) fn lost(&mut self, ids: &[usize]) {
        self.lost_uses += 1;
        for &id in ids {
            // The driver does not report the end of this use.
            self.chunks[id].stays = true;
        }
    }

    /// Does the same for the launch of a graph that uses these chunks.
    pub(crate) fn graph_lost(&mut self, ids: &[usize]) {
        for &id in ids {
            self.chunks[id].holders += 1;
        }
        self.lost(ids);
    }
}
