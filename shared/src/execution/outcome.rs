//! How requests and attempts end, as counted (gateway.md §13, label values of G83).

use crate::label_enum;

label_enum! {
    /// `outcome` of `iop_edge_requests_total`: exactly one per request.
    pub enum Outcome {
        Success => "success",
        ClientError => "client_error",
        ProviderError => "provider_error",
        ResponseStalled => "response_stalled",
        Rejected => "rejected",
        ClientCancelled => "client_cancelled",
        Incomplete => "incomplete",
        InternalError => "internal_error",
    }
}

label_enum! {
    /// `result` of `iop_edge_attempts_total`: exactly one per dispatch to a provider.
    pub enum AttemptResult {
        Success => "success",
        Http4xx => "http_4xx",
        Http5xx => "http_5xx",
        RateLimited => "rate_limited",
        ConnectError => "connect_error",
        Cut => "cut",
        ResponseStalled => "response_stalled",
        FirstContentTimeout => "first_content_timeout",
        NodeLost => "node_lost",
        Capacity => "capacity",
        Cancelled => "cancelled",
    }
}
