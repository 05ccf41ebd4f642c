//! Requests waiting for a provider with room: one line in order of arrival, bounded per model (G33). Pure.

use std::collections::VecDeque;
use std::sync::Arc;

/// Names a waiter; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ticket(i64);

struct Waiter<W> {
    ticket: Ticket,
    model: Arc<str>,
    with: W,
}

/// The line. `W` is what the shell keeps with a waiter.
pub(super) struct Queue<W> {
    line: VecDeque<Waiter<W>>,
    next: i64,
    next_front: i64,
    max_depth: usize,
}

impl<W> Queue<W> {
    /// `max_depth`: waiters of one model.
    pub(super) fn new(max_depth: usize) -> Self {
        Self {
            line: VecDeque::new(),
            next: 0,
            next_front: -1,
            max_depth,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.line.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.line.len()
    }

    pub(super) fn depth(&self, model: &str) -> usize {
        self.line.iter().filter(|w| *w.model == *model).count()
    }

    /// Joins the line; `None`: it is full for this model.
    pub(super) fn join(&mut self, model: Arc<str>, with: W) -> Option<Ticket> {
        if self.depth(&model) >= self.max_depth {
            return None;
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        self.line.push_back(Waiter { ticket, model, with });
        Some(ticket)
    }

    /// Comes back to the head of the line: it was served before, and its place turned out to be taken. No bound, for it
    /// was let in already.
    pub(super) fn come_back(&mut self, model: Arc<str>, with: W) -> Ticket {
        let ticket = Ticket(self.next_front);
        self.next_front -= 1;
        self.line.push_front(Waiter { ticket, model, with });
        ticket
    }

    /// Leaves the line, wherever in it.
    pub(super) fn leave(&mut self, ticket: Ticket) {
        // Tickets rise along the line.
        if let Ok(i) = self.line.binary_search_by_key(&ticket, |w| w.ticket) {
            self.line.remove(i);
        }
    }

    /// Offers a place to each waiter in order; who takes one leaves the line.
    pub(super) fn offer<T>(&mut self, mut take: impl FnMut(&W) -> Option<T>) -> Vec<(W, T)> {
        let mut served = Vec::new();
        let mut i = 0;
        while i < self.line.len() {
            match take(&self.line[i].with) {
                Some(place) => {
                    if let Some(waiter) = self.line.remove(i) {
                        served.push((waiter.with, place));
                    }
                }
                None => i += 1,
            }
        }
        served
    }

    pub(super) fn waiting(&self) -> impl Iterator<Item = &W> {
        self.line.iter().map(|w| &w.with)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_model_cannot_fill_the_line_of_another() {
        let mut q = Queue::new(2);
        for _ in 0..2 {
            assert!(q.join("a".into(), ()).is_some());
        }
        assert!(q.join("a".into(), ()).is_none());
        assert!(q.join("b".into(), ()).is_some());
    }

    #[test]
    fn who_comes_back_stands_first_even_in_a_full_line() {
        let mut q = Queue::new(1);
        q.join("a".into(), 1).unwrap();
        let back = q.come_back("a".into(), 2);
        q.come_back("a".into(), 3);
        assert_eq!(q.waiting().copied().collect::<Vec<_>>(), [3, 2, 1]);
        q.leave(back);
        assert_eq!(q.waiting().copied().collect::<Vec<_>>(), [3, 1]);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Join(u8),
        Leave(prop::sample::Index),
        Offer(u8),
    }

    proptest! {
        /// The naive model is a list of (ticket, model).
        #[test]
        fn it_is_first_come_first_served_per_model(ops in prop::collection::vec(prop_oneof![
            (0_u8..3).prop_map(Op::Join),
            any::<prop::sample::Index>().prop_map(Op::Leave),
            (0_u8..3).prop_map(Op::Offer),
        ], 0..80)) {
            let mut queue = Queue::new(4);
            let mut naive: Vec<(Ticket, u8)> = Vec::new();
            for op in ops {
                match op {
                    Op::Join(m) => {
                        let full = naive.iter().filter(|(_, n)| *n == m).count() >= 4;
                        let ticket = queue.join(m.to_string().into(), m);
                        prop_assert_eq!(ticket.is_none(), full);
                        naive.extend(ticket.map(|t| (t, m)));
                    }
                    Op::Leave(i) => {
                        if !naive.is_empty() {
                            let (ticket, _) = naive.remove(i.index(naive.len()));
                            queue.leave(ticket);
                            queue.leave(ticket);
                        }
                    }
                    Op::Offer(m) => {
                        let mut one = true;
                        let served = queue.offer(|w| (*w == m && std::mem::take(&mut one)).then_some(()));
                        let first = naive.iter().position(|(_, n)| *n == m);
                        prop_assert_eq!(served.len(), usize::from(first.is_some()));
                        if let Some(i) = first {
                            naive.remove(i);
                        }
                    }
                }
                prop_assert_eq!(queue.waiting().copied().collect::<Vec<_>>(), naive.iter().map(|(_, m)| *m).collect::<Vec<_>>());
            }
        }
    }
}
