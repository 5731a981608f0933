create schema if not exists fairq;
comment on schema fairq is 'fairq: a multi-tenant fair queue. Applications append, the engine moves, policy acts at promotion, order acts at pop.';
