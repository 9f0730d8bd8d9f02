// Softmax over the approximate logits of one job: log-sum-exps, the mass of each page, and of the tokens that are
// chosen.
//
// Logits are kept, in base e, and go by once for each of: the sums, the masses of pages, the chosen tokens.
// Weights are 2^((s - max) log2 e - log2 of their sum). Their sums are fixed-point numbers of 48 bits behind the
// point, which lose nothing; those of pages, which may all be small, are fp32.
`default_nettype none
module token_mass #(parameter G = 1, parameter LN = 16) (
    input  wire            clk,
    input  wire            rst,
    input  wire            start,
    // of all tokens, those of the context first
    input  wire            logit_valid,
    input  wire [32*G-1:0] logit,
    // passes, each a pulse when the one before it is done
    input  wire            sum,
    output wire            summed,             // level
    input  wire            pages,              // masses of pages, as keys
    input  wire [31:0]     page_tokens,
    input  wire [LN:0]     context_tokens,     // tokens
    input  wire [31:0]     sinks,
    output reg             key_valid,
    output reg  [31:0]     key,
    output wire            paged,              // level
    input  wire            weigh_valid,        // a token of the context, in order, and whether it is chosen
    input  wire            weigh_take,
    input  wire            weigh_window,       // the window, behind the context
    output reg             done,               // level
    output reg  [32*G-1:0] lse,
    output reg  [32*G-1:0] alpha,
    output reg  [32*G-1:0] rest,               // 1 - alpha
    output reg  [31:0]     window_mass
);
    localparam LG = $clog2(G);
    localparam N = 1 << LG;                    // heads and more, a power of two
    localparam POINT = 48;
    localparam WIDTH = POINT + LN + 2;         // of a sum, and its sign
    localparam LATENCY = 22;                   // of a weight
    localparam SETTLE = 32, PAGES_SETTLE = 96; // longer than the way of a token
    localparam [31:0] LOG2E = 32'h3fb8aa3b, LN2 = 32'h3f317218;
    localparam [31:0] SHARE = G == 1 ? 32'h3f800000 : G == 2 ? 32'h3f000000 : G == 4 ? 32'h3e800000
                            : G == 5 ? 32'h3e4ccccd : 32'h3e000000;
    localparam [2:0] GATHER = 0, SUM = 1, LOG = 2, READY = 3, PAGES = 4, WINDOW = 5, END = 6, DONE = 7;
    reg [2:0] state;
    reg [LN:0] tokens, at;
    reg [6:0] settle;
    wire by_counter = state == SUM || state == PAGES || state == WINDOW;
    wire [LN:0] end_at = state == PAGES ? context_tokens : tokens;
    wire count = by_counter && at != end_at;
    wire settled = by_counter && !count && settle == 0;
    wire read = count || (state == READY && weigh_valid);

    // Weights.
    reg [32*G-1:0] logits [0:(1<<LN)-1];
    reg [32*G-1:0] row;
    reg row_valid;
    reg [LATENCY:0] takes, windows;            // along with the weights
    always @(posedge clk) begin
        if (logit_valid) logits[tokens[LN-1:0]] <= logit;
        row <= logits[at[LN-1:0]];
        row_valid <= read && !rst;
        takes <= {takes[LATENCY-1:0], state != READY || weigh_take};
        windows <= {windows[LATENCY-1:0], state == WINDOW};
    end
    wire [G-1:0] weight_valid;
    wire [32*N-1:0] weights;
    reg weighed, weighed_take, weighed_window;
    reg clear;
    wire [WIDTH*G-1:0] masses, window_masses;
    wire [32*G-1:0] maxima;
    reg [32*G-1:0] less;                       // -log2 of the sums
    function automatic [31:0] order(input [31:0] x);
        order = x[31] ? ~x : {1'b1, x[30:0]};
    endfunction
    genvar g;
    generate for (g = 0; g < N; g = g + 1) begin : head
        if (g < G) begin : one
            wire [31:0] x = logit[32*g +: 32];
            reg [31:0] top;
            reg [POINT:0] fixed;
            reg [WIDTH-1:0] mass, window_mass_;
            wire difference_valid, exponent_valid;
            wire [31:0] difference, exponent, weight;
            add_single subtract(.clk(clk), .rst(rst), .in_valid(row_valid), .a(row[32*g +: 32]),
                .b({~top[31], top[30:0]}), .out_valid(difference_valid), .y(difference));
            zkf_fma #(.WEXP(8), .WMAN(24), .STAGE_PRODUCT(1), .STAGE_NORMALIZE(1), .STAGE_OUTPUT(1), .LATENCY(8))
                binary(.clk(clk), .rst(rst), .in_valid(difference_valid), .a(difference), .b(LOG2E),
                    .c(less[32*g +: 32]), .out_valid(exponent_valid), .y(exponent));
            zkf_exp2 #(.WEXP(8), .WMAN(24), .STAGE_REDUCE(1), .STAGE_PRODUCT(1), .STAGE_PRODUCT_SQUARE(1),
                .STAGE_PRODUCT_CHAIN(1), .STAGE_PACK(1), .STAGE_OUTPUT(1), .LATENCY(7))
                exponential(.clk(clk), .rst(rst), .in_valid(exponent_valid), .x(exponent),
                    .out_valid(weight_valid[g]), .y(weight));
            wire [7:0] down = 8'd127 - weight[30:23];
            always @(posedge clk) begin
                if (logit_valid && (tokens == 0 || order(x) > order(top))) top <= x;
                fixed <= weight[30:23] == 0 ? 0 : {1'b1, weight[22:0], {(POINT-23){1'b0}}} >> down;
                if (clear) begin
                    mass <= 0;
                    window_mass_ <= 0;
                end else if (weighed) begin
                    if (weighed_take) mass <= mass + {{(WIDTH-POINT-1){1'b0}}, fixed};
                    if (weighed_window) window_mass_ <= window_mass_ + {{(WIDTH-POINT-1){1'b0}}, fixed};
                end
            end
            assign weights[32*g +: 32] = weight;
            assign masses[WIDTH*g +: WIDTH] = mass;
            assign window_masses[WIDTH*g +: WIDTH] = window_mass_;
            assign maxima[32*g +: 32] = top;
        end else begin : none
            assign weights[32*g +: 32] = 32'd0;
        end
    end endgenerate
    always @(posedge clk) begin
        weighed <= weight_valid[0] && state != PAGES && !rst;
        weighed_take <= takes[LATENCY];
        weighed_window <= windows[LATENCY];
    end

    // Masses of pages: over the heads, 16 tokens, and the parts of a page.
    wire token_valid, part_valid, page_valid;
    wire [31:0] token_sum, part_sum, page_sum;
    reg [31:0] page_before;
    reg [27:0] part, page;
    wire part_last = part + 28'd1 == page_tokens[31:4];
    add_tree #(.N(N)) over_heads(.clk(clk), .rst(rst), .in_valid(weight_valid[0] && state == PAGES), .x(weights),
        .out_valid(token_valid), .y(token_sum));
    add_sequence #(.N(16)) over_tokens(.clk(clk), .rst(rst || start), .in_valid(token_valid), .x(token_sum),
        .out_valid(part_valid), .y(part_sum));
    add_single over_parts(.clk(clk), .rst(rst), .in_valid(part_valid), .a(part == 0 ? 32'd0 : page_before),
        .b(part_sum), .out_valid(page_valid), .y(page_sum));
    always @(posedge clk) begin
        key_valid <= page_valid && part_last && !rst;
        key <= {4'd0, page} < sinks ? 32'hffffffff : {1'b1, page_sum[30:0]};
        if (rst || start) begin
            part <= 0;
            page <= 0;
        end else if (page_valid) begin
            page_before <= page_sum;
            part <= part_last ? 28'd0 : part + 28'd1;
            if (part_last) page <= page + 28'd1;
        end
    end

    // What follows from the sums, one number after another: log2 and lse of each head; alpha and 1 - alpha of
    // each, and the mass of the window.
    reg [4:0] number;
    reg number_sent;
    wire [3:0] number_head = number[4:1];
    wire window_number = state == END && number == 2 * G;
    reg [WIDTH-1:0] fixed_in, all_windows;
    integer h;
    localparam [WIDTH-1:0] WHOLE = {{(WIDTH-POINT-1){1'b0}}, 1'b1, {POINT{1'b0}}};
    wire [WIDTH-1:0] head_mass = masses[WIDTH*(state == LOG ? number[3:0] : number_head) +: WIDTH];
    wire [WIDTH-1:0] at_most_whole = head_mass > WHOLE ? WHOLE : head_mass;
    always @* begin
        all_windows = 0;
        for (h = 0; h < G; h = h + 1) all_windows = all_windows + window_masses[WIDTH*h +: WIDTH];
        fixed_in = state == LOG ? head_mass : window_number ? all_windows
                 : number[0] ? WHOLE - at_most_whole : at_most_whole;
    end
    reg send;
    reg [WIDTH-1:0] sent;
    wire float_valid, log_valid, last_valid, log_domain, log_pole;
    wire [31:0] float_raw, log_y, last_y;
    zkf_from_int #(.WEXP(8), .WMAN(24), .WINT(WIDTH), .STAGE_NORMALIZE(1), .STAGE_PACK(1), .STAGE_OUTPUT(1))
        to_float(.clk(clk), .rst(rst), .in_valid(send), .a(sent), .out_valid(float_valid), .y(float_raw));
    wire [31:0] float_y = float_raw[30:23] == 0 ? 32'd0 : {1'b0, float_raw[30:23] - 8'(POINT), float_raw[22:0]};
    zkf_log2 #(.WEXP(8), .WMAN(24), .STAGE_INPUT(1), .STAGE_PRODUCT(1), .STAGE_PRODUCT_SQUARE(1),
        .STAGE_PRODUCT_CHAIN(1), .STAGE_ALIGN(1), .STAGE_PRODUCT_FINAL(1), .STAGE_PACK(1), .STAGE_OUTPUT(1))
        logarithm(.clk(clk), .rst(rst), .in_valid(float_valid && state == LOG), .x(float_y), .out_valid(log_valid),
            .y(log_y), .domain_error(log_domain), .pole(log_pole));
    // lse = log2 * ln 2 + max; the window's mass = its sum * 1 / G.
    zkf_fma #(.WEXP(8), .WMAN(24), .STAGE_INPUT(1), .STAGE_PRODUCT(1), .STAGE_NORMALIZE(1), .STAGE_OUTPUT(1))
        last(.clk(clk), .rst(rst), .in_valid(log_valid || (float_valid && window_number)),
            .a(state == LOG ? log_y : float_y), .b(state == LOG ? LN2 : SHARE),
            .c(state == LOG ? maxima[32*number[3:0] +: 32] : 32'd0), .out_valid(last_valid), .y(last_y));

    reg is_paged;
    assign summed = state == READY;
    assign paged = is_paged;
    always @(posedge clk) begin
        clear <= 0;
        send <= 0;
        if (read) at <= at + 1'b1;
        settle <= read ? (state == PAGES ? 7'(PAGES_SETTLE) : 7'(SETTLE)) : settle - (settle != 0);
        if (logit_valid) tokens <= tokens + 1'b1;
        if (rst || start) begin
            state <= GATHER;
            tokens <= 0;
            at <= 0;
            settle <= 0;
            is_paged <= 0;
            done <= 0;
            less <= 0;
            clear <= 1;
        end else case (state)
            GATHER: if (sum) state <= SUM;
            SUM: if (settled) begin
                state <= LOG;
                number <= 0;
                number_sent <= 0;
            end
            LOG: begin
                send <= !number_sent;
                number_sent <= 1;
                sent <= fixed_in;
                if (log_valid) less[32*number[3:0] +: 32] <= {~log_y[31], log_y[30:0]};
                if (last_valid) begin
                    lse[32*number[3:0] +: 32] <= last_y;
                    number <= number + 5'd1;
                    number_sent <= 0;
                    if (number == G - 1) begin
                        state <= READY;
                        at <= 0;
                        clear <= 1;
                    end
                end
            end
            READY: begin
                if (pages) state <= PAGES;
                if (weigh_window) state <= WINDOW;
            end
            PAGES: if (settled) begin
                state <= READY;
                is_paged <= 1;
                at <= 0;
            end
            WINDOW: if (settled) begin
                state <= END;
                number <= 0;
                number_sent <= 0;
            end
            END: begin
                send <= !number_sent;
                number_sent <= 1;
                sent <= fixed_in;
                if (float_valid && !window_number) begin
                    if (number[0]) rest[32*number_head +: 32] <= float_y;
                    else alpha[32*number_head +: 32] <= float_y;
                    number <= number + 5'd1;
                    number_sent <= 0;
                end
                if (last_valid) begin
                    window_mass <= last_y;
                    state <= DONE;
                    done <= 1;
                end
            end
            default: ;
        endcase
    end
endmodule
`default_nettype wire
