use proptest::prelude::*;

use super::*;

const DEPTH: usize = 6;

fn who(key: &str, priority: Priority) -> Who {
    Who {
        key: key.into(),
        priority,
    }
}

fn normal(key: &str) -> Who {
    who(key, Priority::Normal)
}

/// What everybody would be offered, in order.
fn line<W: Clone>(queue: &mut Queue<W>) -> Vec<W> {
    let mut seen = Vec::new();
    let served = queue.offer(|w| {
        seen.push(w.clone());
        None::<()>
    });
    assert!(served.is_empty());
    seen
}

/// Serves the first in line.
fn serve<W: Clone>(queue: &mut Queue<W>) -> Option<W> {
    let mut one = Some(());
    queue.offer(|_| one.take()).pop().map(|(w, ())| w)
}

#[test]
fn one_model_cannot_fill_the_line_of_another() {
    let mut q = Queue::new(2);
    for _ in 0..2 {
        assert!(q.join("a".into(), &normal("k"), ()).is_some());
    }
    assert!(q.join("a".into(), &normal("k"), ()).is_none());
    assert!(q.join("a".into(), &who("l", Priority::High), ()).is_none());
    assert!(q.join("b".into(), &normal("k"), ()).is_some());
    assert_eq!((q.depth("a"), q.depth("b"), q.depth("c"), q.len()), (2, 1, 0, 3));
}

#[test]
fn who_comes_back_stands_first_even_in_a_full_line() {
    let mut q = Queue::new(1);
    q.join("a".into(), &normal("k"), 1).unwrap();
    let back = q.come_back("a".into(), &normal("k"), 2);
    q.come_back("a".into(), &normal("l"), 3);
    assert_eq!(line(&mut q), [3, 2, 1]);
    // Before its class, not before a higher one, and before other models.
    q.come_back("a".into(), &who("h", Priority::High), 4);
    q.come_back("a".into(), &who("h", Priority::Low), 5);
    q.join("b".into(), &normal("k"), 6).unwrap();
    q.join("b".into(), &who("h", Priority::High), 7);
    assert_eq!(line(&mut q), [4, 3, 2, 1, 6, 5]);
    q.leave(back);
    assert_eq!(line(&mut q), [4, 3, 1, 6, 5]);
}

#[test]
fn a_higher_class_goes_first_in_all_models() {
    let mut q = Queue::new(9);
    for (n, (model, priority)) in [
        ("a", Priority::Low),
        ("a", Priority::Normal),
        ("b", Priority::Low),
        ("b", Priority::High),
        ("a", Priority::High),
        ("b", Priority::Normal),
    ]
    .into_iter()
    .enumerate()
    {
        q.join(model.into(), &who("k", priority), n).unwrap();
    }
    assert_eq!(line(&mut q), [3, 4, 1, 5, 0, 2]);
}

#[test]
fn a_crowd_of_one_key_does_not_hold_up_the_first_of_another() {
    let mut q = Queue::new(1000);
    for n in 0..200 {
        q.join("m".into(), &normal("crowd"), n).unwrap();
    }
    assert_eq!(serve(&mut q), Some(0));
    q.join("m".into(), &normal("late"), 1000).unwrap();
    assert_eq!(line(&mut q)[..3], [1, 1000, 2]);
    q.join("m".into(), &normal("late"), 1001).unwrap();
    assert_eq!(line(&mut q)[..5], [1, 1000, 2, 1001, 3]);
}

#[test]
fn a_crowd_that_gave_up_waiting_pays_nothing() {
    let mut q = Queue::new(1000);
    let crowd: Vec<Ticket> = (0..200)
        .map(|n| q.join("m".into(), &normal("crowd"), n).unwrap())
        .collect();
    for n in 1000..1010 {
        q.join("m".into(), &normal("other"), n).unwrap();
    }
    for ticket in &crowd[..150] {
        q.leave(*ticket);
    }
    assert_eq!(line(&mut q)[..4], [150, 1000, 151, 1001]);
    // All of it, and back again: neither ahead nor behind.
    for ticket in crowd {
        q.leave(ticket);
    }
    q.join("m".into(), &normal("crowd"), 300).unwrap();
    assert_eq!(line(&mut q)[..3], [1000, 300, 1001]);
}

#[test]
fn rounds_are_forgotten_when_they_no_longer_matter() {
    let keys = |q: &Queue<usize>| q.lines.get("m").map_or(0, |line| line.classes[1].keys.len());
    let mut q = Queue::new(1000);
    for n in 0..3 {
        q.join("m".into(), &normal("steady"), n).unwrap();
    }
    // Each passing key is one ahead for a moment.
    for n in 100..200 {
        q.join("m".into(), &normal(&n.to_string()), n).unwrap();
    }
    assert_eq!(keys(&q), 101);
    assert_eq!(serve(&mut q), Some(0));
    for n in 100..200 {
        assert_eq!(serve(&mut q), Some(n));
    }
    assert_eq!(keys(&q), 1, "none is ahead of the one that waits");
    while serve(&mut q).is_some() {}
    assert!(q.lines.is_empty() && q.waiters.is_empty());
}

#[derive(Debug, Clone)]
enum Op {
    Join(u8, Who),
    ComeBack(u8, Who),
    Leave(prop::sample::Index),
    /// Places at these models for those waiters, this many.
    Offer(u8, u64, usize),
}

fn anybody() -> impl Strategy<Value = Who> {
    let priority =
        prop_oneof![1 => Just(Priority::High), 4 => Just(Priority::Normal), 1 => Just(Priority::Low)];
    (0_u8..4, priority).prop_map(|(key, priority)| who(&key.to_string(), priority))
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (0_u8..3, anybody()).prop_map(|(m, w)| Op::Join(m, w)),
        1 => (0_u8..3, anybody()).prop_map(|(m, w)| Op::ComeBack(m, w)),
        1 => any::<prop::sample::Index>().prop_map(Op::Leave),
        2 => (0_u8..8, any::<u64>(), 1_usize..3).prop_map(|(models, odd, n)| Op::Offer(models, odd, n)),
    ]
}

/// One list, and a round for each key that never forgets while its class waits.
#[derive(Default)]
struct Naive {
    waiters: Vec<(Ticket, u8, Who)>,
    rounds: BTreeMap<(u8, usize, Arc<str>), u64>,
}

impl Naive {
    fn ordinary(&self, model: u8, class: usize) -> impl Iterator<Item = &(Ticket, u8, Who)> {
        self.waiters
            .iter()
            .filter(move |(t, m, w)| *m == model && class_of(w.priority) == class && !t.came_back())
    }

    fn virtual_round(&self, model: u8, class: usize) -> u64 {
        self.ordinary(model, class)
            .map(|(_, _, w)| self.rounds[&(model, class, w.key.clone())])
            .min()
            .unwrap_or(0)
    }

    fn join(&mut self, ticket: Ticket, model: u8, who: Who) {
        let class = class_of(who.priority);
        if !ticket.came_back() {
            let now = self.virtual_round(model, class);
            let round = self.rounds.entry((model, class, who.key.clone())).or_insert(now);
            *round = now.max(*round);
        }
        self.waiters.push((ticket, model, who));
    }

    fn remove(&mut self, ticket: Ticket, served: bool) {
        let i = self.waiters.iter().position(|(t, _, _)| *t == ticket).unwrap();
        let (_, model, who) = self.waiters.remove(i);
        let class = class_of(who.priority);
        if served && !ticket.came_back() {
            *self.rounds.get_mut(&(model, class, who.key)).unwrap() += 1;
        }
        if self.ordinary(model, class).next().is_none() {
            self.rounds.retain(|(m, c, _), _| (*m, *c) != (model, class));
        }
    }

    fn of_model(&self, model: u8, class: usize) -> Vec<Ticket> {
        let mut all: Vec<(u64, Ticket)> = Vec::new();
        for (ticket, _, who) in self.ordinary(model, class) {
            let before = self
                .ordinary(model, class)
                .filter(|(t, _, w)| w.key == who.key && t < ticket)
                .count();
            all.push((
                self.rounds[&(model, class, who.key.clone())] + before as u64,
                *ticket,
            ));
        }
        all.sort_unstable();
        let mut back: Vec<Ticket> = self
            .waiters
            .iter()
            .filter(|(t, m, w)| *m == model && class_of(w.priority) == class && t.came_back())
            .map(|(t, _, _)| *t)
            .collect();
        back.sort_unstable();
        back.extend(all.into_iter().map(|(_, t)| t));
        back
    }

    fn order(&self) -> Vec<Ticket> {
        let mut order = Vec::new();
        for class in 0..CLASSES {
            let mut lines: Vec<Vec<Ticket>> = (0..3).map(|m| self.of_model(m, class)).collect();
            while let Some(line) = lines
                .iter_mut()
                .filter(|line| !line.is_empty())
                .min_by_key(|line| line[0])
            {
                order.push(line.remove(0));
            }
        }
        order
    }
}

proptest! {
    #[test]
    fn the_line_is_the_naive_one(ops in prop::collection::vec(op(), 0..120)) {
        // A waiter knows its number; the naive model's ticket is found by it.
        let mut queue = Queue::new(DEPTH);
        let mut naive = Naive::default();
        let mut tickets: Vec<Ticket> = Vec::new();
        for op in ops {
            match op {
                Op::Join(model, who) => {
                    let depth = naive.waiters.iter().filter(|(_, m, _)| *m == model).count();
                    let n = tickets.len();
                    match queue.join(model.to_string().into(), &who, (n, model)) {
                        Some(ticket) => {
                            prop_assert!(depth < DEPTH);
                            tickets.push(ticket);
                            naive.join(ticket, model, who);
                        }
                        None => prop_assert!(depth >= DEPTH),
                    }
                }
                Op::ComeBack(model, who) => {
                    let ticket = queue.come_back(model.to_string().into(), &who, (tickets.len(), model));
                    tickets.push(ticket);
                    naive.join(ticket, model, who);
                }
                Op::Leave(i) => {
                    if !naive.waiters.is_empty() {
                        let ticket = i.get(&naive.waiters).0;
                        naive.remove(ticket, false);
                        queue.leave(ticket);
                        queue.leave(ticket);
                    }
                }
                Op::Offer(models, odd, mut places) => {
                    let fits = |n: usize, model: u8| models >> model & 1 == 1 && odd >> (n % 64) & 1 == 1;
                    let mut want = Vec::new();
                    for ticket in naive.order() {
                        let n = tickets.iter().position(|t| *t == ticket).unwrap();
                        let model = naive.waiters.iter().find(|(t, _, _)| *t == ticket).unwrap().1;
                        if want.len() < places && fits(n, model) {
                            want.push(n);
                        }
                    }
                    let served = queue.offer(|(n, model)| {
                        (places > 0 && fits(*n, *model)).then(|| places -= 1)
                    });
                    let served: Vec<usize> = served.into_iter().map(|((n, _), ())| n).collect();
                    prop_assert_eq!(&served, &want);
                    for n in served {
                        naive.remove(tickets[n], true);
                    }
                }
            }
            let order: Vec<Ticket> = line(&mut queue).into_iter().map(|(n, _)| tickets[n]).collect();
            prop_assert_eq!(&order, &naive.order());
            prop_assert_eq!(queue.len(), naive.waiters.len());
            prop_assert_eq!(queue.is_empty(), naive.waiters.is_empty());
            prop_assert_eq!(queue.waiting().count(), naive.waiters.len());
            for model in 0..3_u8 {
                let depth = naive.waiters.iter().filter(|(_, m, _)| *m == model).count();
                prop_assert_eq!(queue.depth(&model.to_string()), depth);
            }
            for class in queue.lines.values().flat_map(|l| &l.classes) {
                prop_assert_eq!(class.keys.len(), class.rounds.len());
                if let Some((_, key)) = class.rounds.first() {
                    prop_assert!(!class.keys[key].waiting.is_empty());
                }
            }
        }
    }

    /// Between two consecutive places of a key that waits all the while, any other key of its class gets two at most: its
    /// round is the first one's or one more each time, and rises with each place. Before the first place of a key that
    /// was not ahead, it gets one: it stands at the virtual round, and each other key has one request in that round.
    #[test]
    fn no_key_waits_longer_than_its_turn(
        ops in prop::collection::vec(prop_oneof![
            3 => (0_u8..4).prop_map(|key| (Some(key), None)),
            1 => any::<prop::sample::Index>().prop_map(|i| (None, Some(i))),
            3 => Just((None, None)),
        ], 0..300),
    ) {
        let mut queue = Queue::new(1000);
        let mut waiting: Vec<(Ticket, u8)> = Vec::new();
        // Of each key: places that each other key got while it waits, and how many it may.
        let mut since = [[0_u32; 4]; 4];
        let mut bound = [1_u32; 4];
        // Who got a place since the line was empty: it may be ahead.
        let mut served_once = [false; 4];
        for op in ops {
            match op {
                (Some(key), _) => {
                    if !waiting.iter().any(|(_, k)| *k == key) {
                        since[usize::from(key)] = [0; 4];
                        bound[usize::from(key)] = if served_once[usize::from(key)] { u32::MAX } else { 1 };
                    }
                    let ticket = queue.join("m".into(), &normal(&key.to_string()), key).unwrap();
                    waiting.push((ticket, key));
                }
                (None, Some(i)) => {
                    if !waiting.is_empty() {
                        let (ticket, _) = waiting.remove(i.index(waiting.len()));
                        queue.leave(ticket);
                    }
                }
                (None, None) => {
                    let Some(key) = serve(&mut queue) else {
                        prop_assert!(waiting.is_empty());
                        continue;
                    };
                    // The oldest of its key.
                    let i = waiting.iter().position(|(_, k)| *k == key).unwrap();
                    waiting.remove(i);
                    let served = usize::from(key);
                    served_once[served] = true;
                    for other in 0..4 {
                        if other != served && waiting.iter().any(|(_, k)| usize::from(*k) == other) {
                            since[other][served] += 1;
                            prop_assert!(since[other][served] <= bound[other], "key {served} before key {other}");
                        }
                    }
                    since[served] = [0; 4];
                    bound[served] = 2;
                }
            }
            if waiting.is_empty() {
                served_once = [false; 4];
            }
        }
    }
}
